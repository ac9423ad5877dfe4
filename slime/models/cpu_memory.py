"""Memory of processes that compute: reuse of memory that a step on the CPU frees, small kernel
caches, and imports that the garbage collector leaves alone."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024
LARGEST_INT = 2**31 - 1
HUGE_PAGES = ("THP_MEM_ALLOC_ENABLE", "1")  # torch reads this variable at its first allocation
COMPUTE_VARIABLES = {
    # Threads that spin while they wait would take the cores from those that compute.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "2000",  # Without a short spin, small operations are a third slower.
    "TOKENIZERS_PARALLELISM": "false",
    # MKL gives the same bits for every alignment of buffers, at no measurable cost. Without it, the
    # embedded engine in deterministic mode computes attention row by row.
    "MKL_CBWR": "AUTO",
    # oneDNN, and ideep between torch and oneDNN, compile a kernel of about 0.3 MB for each shape of
    # a matrix product and keep 1024 each by default. Almost every pack of tokens has a new length,
    # so these kernels are rarely used again, and a process grows by about 600 MB until the caches
    # are full. A model needs about 20 shapes for the forward and backward passes of one micro-batch,
    # for any number of layers. Compiling a kernel again takes 0.1 ms and gives the same kernel.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
}
"""The variables of every process that computes, in a run with Ray and in one that is inline: equal,
for equal bits.
"""


@contextlib.contextmanager
def large_imports() -> Iterator[None]:
    """Import large libraries without the garbage collector, which then never visits what they have
    created.

    torch and transformers create half a million objects, which live as long as the process. The
    collections that they cause take a sixth of the time of these imports, and every later full
    collection would visit them again.
    """
    enabled = gc.isenabled()
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        # Otherwise all was imported before, and other objects would be frozen.
        if len(sys.modules) - before > 100:
            gc.freeze()
        if enabled:
            gc.enable()


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Keep the garbage collector from running, for a short time in which others wait.

    In a trainer with compiled layers, a full collection takes 0.1 to 0.2 s. That is longer than
    engines pause for the factors of an adapter.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def keep_freed_memory() -> bool:
    """Tell glibc to allocate activations from its heap and not to return freed memory to the
    system.

    Otherwise each activation is mapped, cleared page by page and unmapped again in every step,
    which takes 10% of a step of SmolLM2 on a virtual machine. Allocations that are too large for
    the heap use huge pages, which take a sixth of the time of small pages. This must be called
    before torch's first allocation.

    Returns:
        Whether the C library supports it.
    """
    if not sys.platform.startswith("linux"):
        return False
    os.environ.setdefault(*HUGE_PAGES)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD) and mallopt(M_TRIM_THRESHOLD, LARGEST_INT)
    )


def set_compute_variables() -> None:
    """Set the environment variables that torch's libraries read once, unless the user has set them.

    OpenMP reads its own when torch is imported, MKL and oneDNN at their first matrix product.
    """
    for name, value in COMPUTE_VARIABLES.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault(*HUGE_PAGES)  # huge pages for the large tensors of torch
