"""Seeded random input: every case can be run again by its number. Nothing may raise but what
callers expect.
"""

from __future__ import annotations

import sys
from pathlib import Path

for _room in ("engines", "config", "plugins/agents", "plugins/embedded", "examples"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _room))

from config_parts import workplace  # noqa: E402

__all__ = ["workplace"]
