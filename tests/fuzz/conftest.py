"""Seeded random input: every case can be run again by its number. Nothing may raise but what callers expect."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
sys.path.insert(0, str(Path(__file__).parents[1] / "config"))

from config_parts import workplace

__all__ = ["workplace"]
