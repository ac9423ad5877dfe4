"""Memory of processes that compute on the CPU: reuse of what a training step frees, and small kernel caches."""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024
LARGEST_INT = 2**31 - 1
HUGE_PAGES = ("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it at its first allocation
KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Variables for the number of kernels that are kept by oneDNN and by ideep, the layer between torch and oneDNN."""
KERNELS_KEPT = "64"


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


def bound_kernel_caches() -> None:
    """Limit the compiled matrix products that torch keeps on the CPU; a user's own setting has precedence.

    oneDNN compiles a kernel of about 0.3 MB for each shape and keeps 1024 of them by default; ideep keeps 1024 more.
    Packs of tokens have a new length each time, so these kernels are rarely used again, and a process grows by some
    600 MB before it stops. A model needs about 20 shapes for the forward and backward passes of one micro-batch,
    whatever its number of layers. To compile a kernel again takes 0.1 ms and gives the same kernel. Call it before
    torch's first matrix product, which reads the variables.
    """
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, KERNELS_KEPT)
