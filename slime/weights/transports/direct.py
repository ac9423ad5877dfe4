"""The choice between CUDA IPC or shared memory and a process group, for weights that go from memory to memory.

With GPUs, IPC is used for engines on the *same* GPU as the trainer (``--colocate``, on any host), because NCCL refuses
two ranks on one GPU. Between GPUs, NCCL is faster and needs no peer access by handle.
"""

from __future__ import annotations

from pathlib import Path

from slime.weights.settings import WeightSyncSettings
from slime.weights.transports.base import Transport, TransportKind


def by_handle(settings: WeightSyncSettings, same_host: bool) -> bool:
    """Return whether engines open the trainer's memory. Otherwise they take part in broadcasts."""
    if settings.same_process:
        return True
    if on_cuda():
        return bool(settings.colocate or (same_host and gpus_of_this_host() == 1))
    return same_host


def _create(settings: WeightSyncSettings, colocated_host: bool) -> Transport:
    if by_handle(settings, colocated_host):
        from slime.weights.transports.ipc import IpcTransport

        return IpcTransport(settings.step_seconds, settings.same_process)
    from slime.weights.transports.distributed import DistributedTransport

    return DistributedTransport("nccl" if on_cuda() else "gloo", settings.step_seconds)


def gpus_of_this_host() -> int:
    """Return the number of GPUs, including those that ``CUDA_VISIBLE_DEVICES`` hides from this process."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def on_cuda() -> bool:
    """Return whether this process has a CUDA device."""
    import torch

    return torch.cuda.is_available()


DIRECT = TransportKind(_create, many_senders=True)
