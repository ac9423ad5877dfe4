"""Documented import path of a server on a thread; the code is in :mod:`slime.plugins.compat`."""

from slime.plugins.compat.agent_api import ThreadedServer

__all__ = ["ThreadedServer"]
