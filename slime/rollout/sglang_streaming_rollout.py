"""Documented import path; the code is in :mod:`slime.plugins.agents.streaming`."""

from slime.plugins.agents.streaming import generate_streaming

__all__ = ["generate_streaming"]
