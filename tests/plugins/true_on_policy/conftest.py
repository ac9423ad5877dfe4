"""Tiny models and batches are shared with the tests of the FSDP backend, and the loop of a test
with those of the engines.
"""

import os
import sys
from pathlib import Path

import torch

TESTS = Path(__file__).parents[2]
sys.path += [str(TESTS / room) for room in ("backends", "engines", "plugins/embedded")]

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
