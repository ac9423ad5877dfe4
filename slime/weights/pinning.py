"""Page-lock memory that torch did not allocate as pinned memory, so that copies to a GPU run at full speed."""

from __future__ import annotations

import logging
import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class HostMemory(Protocol):
    """An object with a buffer in host memory."""

    flat: torch.Tensor  # uint8


def pin(owner: HostMemory, device: torch.device) -> bool:
    """Page-lock the buffer of an object in this process while the object exists. Return whether this succeeded.

    Every process that maps shared memory must register its own mapping, although the pages exist only once. If CUDA
    refuses, the memory stays pageable, which is correct but slower.

    Args:
        device: The device to or from which the buffer is copied. Nothing happens unless it is a CUDA device.
    """
    if device.type != "cuda" or not owner.flat.numel():
        return False
    runtime, storage = cuda_runtime(), owner.flat.untyped_storage()
    code = int(runtime.cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0))
    if code:
        logger.warning(
            "cudaHostRegister of %.0f MiB of shared memory failed (error %d): weight updates are copied at the lower "
            "speed of pageable memory", storage.nbytes() / 2**20, code,
        )  # fmt: skip
        clear_error(device)
        return False
    # The finalizer holds a reference to the storage, so the memory stays mapped until it is unregistered. It does not
    # run at exit: then the driver releases everything, and CUDA may have been shut down already.
    weakref.finalize(owner, _unpin, runtime, storage).atexit = False
    return True


def _unpin(runtime: ModuleType, storage: torch.UntypedStorage) -> None:
    synchronize()  # a copy from this memory may still be running
    code = int(runtime.cudaHostUnregister(storage.data_ptr()))
    if code:
        logger.warning("cudaHostUnregister failed (error %d)", code)


def cuda_runtime() -> ModuleType:
    """Return the bindings of the CUDA runtime, which pin memory that exists already."""
    import torch

    return torch.cuda.cudart()


def synchronize() -> None:
    """Wait for the work of the current CUDA device."""
    import torch

    torch.cuda.synchronize()


def clear_error(device: torch.device) -> None:
    """Clear the error of a failed call, which the CUDA runtime keeps and torch raises after the next kernel launch."""
    import torch

    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        logger.debug("the error of cudaHostRegister was cleared")
