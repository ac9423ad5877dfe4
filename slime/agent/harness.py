"""Documented import path of coding agents in a sandbox; the code is in :mod:`slime.plugins.compat`."""

from slime.plugins.compat.agent_api import Harness

__all__ = ["Harness"]
