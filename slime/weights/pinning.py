"""Page-locks memory that torch did not allocate as such, so that copies to a GPU run at full speed."""

from __future__ import annotations

import logging
import weakref
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from slime.weights.delta import HostBucket

logger = logging.getLogger(__name__)


def pin(bucket: HostBucket, device: torch.device) -> bool:
    """Page-lock a bucket's host buffer in this process for as long as the bucket lives; returns whether it is.

    Every process that maps shared memory registers its own mapping; the pages are in memory once. Where CUDA refuses,
    the memory stays pageable, which is correct but slower.

    Args:
        device: that the buffer is copied to; nothing happens unless it is a CUDA device.
    """
    if device.type != "cuda" or not bucket.flat.numel():
        return False
    runtime, storage = _runtime(), bucket.flat.untyped_storage()
    code = int(runtime.cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0))
    if code:
        logger.warning(
            "cudaHostRegister of %.0f MiB of shared memory failed (error %d): updates of the weights are copied to the "
            "GPU at the speed of pageable memory", storage.nbytes() / 2**20, code,
        )  # fmt: skip
        _clear_error(device)
        return False
    # The finalizer holds the storage, so the memory is mapped until it has been unregistered. Not at exit, when the
    # driver releases everything, and CUDA may have been shut down.
    weakref.finalize(bucket, _unpin, runtime, storage).atexit = False
    return True


def _unpin(runtime: ModuleType, storage: torch.UntypedStorage) -> None:
    _synchronize()  # a copy may be under way
    code = int(runtime.cudaHostUnregister(storage.data_ptr()))
    if code:
        logger.warning("cudaHostUnregister failed (error %d)", code)


def _runtime() -> ModuleType:
    import torch

    return torch.cuda.cudart()


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()


def _clear_error(device: torch.device) -> None:
    """The runtime keeps the error of a failed call, and torch raises it after the next kernel launch."""
    import torch

    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        logger.debug("the error of cudaHostRegister was cleared")
