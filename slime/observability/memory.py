"""Measure the memory use of a process and its GPU, for the log of colocated runs."""

from __future__ import annotations

GIB = 2**30


def memory_in_use() -> dict[str, float]:
    """Return the memory use of this process and of its GPU in GiB.

    Returns:
        ``process``: resident CPU memory, including pinned memory. With CUDA also ``tensors`` (live tensors of this
        process), ``reserved`` (memory of its allocator) and ``device`` (memory in use by all processes together).
    """
    import psutil

    used = {"process": psutil.Process().memory_info().rss / GIB}
    import torch

    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        used["tensors"] = torch.cuda.memory_allocated() / GIB
        used["reserved"] = torch.cuda.memory_reserved() / GIB
        used["device"] = (total - free) / GIB
    return used
