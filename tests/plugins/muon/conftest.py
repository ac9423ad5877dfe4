"""Tiny models and batches are shared with the tests of the FSDP backend."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "backends"))
