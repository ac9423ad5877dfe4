"""How much memory a process and its accelerator use, for the log of colocated runs."""

from __future__ import annotations

GIB = 2**30


def memory_in_use() -> dict[str, float]:
    """GiB of this process and of its accelerator.

    Returns:
        ``process``: resident CPU memory, pinned memory included. With CUDA also ``tensors`` (live in this
        process), ``reserved`` (held by its allocator) and ``device`` (in use by all processes together).
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
