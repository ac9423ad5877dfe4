"""Documented import path of the base of the endpoints that a generate function owns."""

from slime.plugins.agents.adapters import BaseAdapter

__all__ = ["BaseAdapter"]
