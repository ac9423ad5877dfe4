"""Cheap memory for a training step, which wants the same gigabytes again and again."""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024
LARGEST_INT = 2**31 - 1
HUGE_PAGES = ("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it at its first allocation


def keep_freed_memory() -> bool:
    """Tell glibc to serve activations from its heap and not to return freed ones to the system.

    Otherwise each is mapped, cleared page by page and unmapped again in every step: 10% of a step of
    SmolLM2 on a virtual machine. What is larger than glibc serves so comes from huge pages: a sixth of the time of
    small ones. Call it before torch's first allocation. Returns whether the C library knows how.
    """
    if not sys.platform.startswith("linux"):
        return False
    os.environ.setdefault(*HUGE_PAGES)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD) and mallopt(M_TRIM_THRESHOLD, LARGEST_INT))
