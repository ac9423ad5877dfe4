"""First on PYTHONPATH of a training process: megatron-core runs on its CPU (``cpu_shim.py``)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import cpu_shim

cpu_shim.prepare_on_cpu()
