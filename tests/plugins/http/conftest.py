"""The tiny models and engines of tests/engines."""

from __future__ import annotations

import sys
from pathlib import Path

for _room in ("engines", "plugins/embedded"):
    sys.path.append(str(Path(__file__).resolve().parents[2] / _room))

from engine_fixtures import tiny_llama  # noqa: E402

__all__ = ["tiny_llama"]
