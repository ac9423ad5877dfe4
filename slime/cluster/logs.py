"""Each actor writes what it prints to a file of its own in the run directory."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path


def redirect_output(log_dir: Path, name: str) -> Path:
    """Send this process's stdout and stderr, C libraries' included, to ``log_dir/name.log``."""
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_dir / f"{name}.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True)
    return path
