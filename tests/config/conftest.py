"""The folder with the smallest checkpoint and data; see ``config_parts``."""

from __future__ import annotations

from config_parts import workplace

__all__ = ["workplace"]
