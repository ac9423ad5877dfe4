"""Transports that send weights to engines: shared memory or CUDA IPC, a process group, or a folder.

``nccl`` stands for two of them, which send from memory to memory. With GPUs, IPC is used for
engines on the *same* GPU as the trainer (``--colocate``, on any host), because NCCL refuses two
ranks on one GPU. Between GPUs, NCCL is faster and needs no peer access by handle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from slime.registry import load
from slime.weights.settings import WeightSyncSettings, transport_part
from slime.weights.transports.base import SendResult, Transport, TransportKind

__all__ = [
    "SendResult",
    "Transport",
    "TransportKind",
    "create_transport",
    "ranks_of_engines",
    "transport_kind",
]

ENGINES_PER_SENDER = 16
"""The most engines per sender, if ``--update-weight-senders`` is not given. The engines of one
sender wait for one another in a broadcast, and are torn if one of them is lost."""


def ranks_of_engines(
    settings: WeightSyncSettings,
    urls: Sequence[str],
    slots: Mapping[str, range],
    world_size: int,
    same_host: bool,
) -> dict[str, range]:
    """Return for each engine the training ranks from whose memory it reads the weights. The first
    one is the sender.

    A CUDA IPC handle can only be opened on the node of its GPU. So each tensor-parallel rank of a
    colocated engine reads from the training rank on its own GPU
    (:mod:`slime.weights.transports.peers`). Without GPUs, the processes on one host that would
    share a GPU are paired in the same way. Engines that receive broadcasts are divided among
    ``--update-weight-senders`` ranks. All other engines get everything from rank 0.

    Args:
        slots: For each engine URL, its slots among the rollout GPUs, which are the trainer's GPUs
            with ``--colocate``.
        same_host: Whether all engines run on the host of rank 0.

    Raises:
        ValueError: A colocated engine is on a GPU without a training rank.
    """
    rank_0 = {url: range(1) for url in urls}
    if not transport_kind(settings).many_senders:
        return rank_0
    if not by_handle(settings, same_host):
        return _divided(settings.sync.update_weight_senders, urls, slots, world_size)
    if not settings.colocate or world_size == 1:
        return rank_0
    alone = [url for url in urls if url not in slots or slots[url].stop > world_size]
    if not on_cuda():
        return rank_0 if alone or not same_host else {url: slots[url] for url in urls}
    if alone:
        raise ValueError(
            f"--colocate: engine {alone[0]} is on a GPU without a training rank; set "
            "--rollout-num-gpus to the number of the trainer's GPUs, or use "
            "--update-weight-transport disk"
        )
    return {url: slots[url] for url in urls}


def _divided(
    senders: int | None, urls: Sequence[str], slots: Mapping[str, range], world_size: int
) -> dict[str, range]:
    """Divide engines among senders, by their slots, so that an engine keeps its sender if other
    engines are lost.

    Each sender has a process group with its own engines and sends all weights to them, at the same
    time as the other senders. The *tensors* are not divided among senders: SGLang handles one
    weight request at a time, so an engine would still receive from one group at a time. And groups
    with common engines would deadlock unless all engines handled them in the same order. The
    senders are spread evenly over the training ranks. Ranks are numbered node by node, so the
    senders use the network interfaces of different nodes.
    """
    wanted = senders or -(-len(urls) // ENGINES_PER_SENDER)
    count = max(min(wanted, world_size, len(urls)), 1)
    places = dict(zip(urls, range(len(urls)), strict=True))
    if slots.keys() >= places.keys():
        places = {url: slots[url].start for url in urls}
    end = max(places.values(), default=0) + 1
    ranks = {url: (place * count // end) * world_size // count for url, place in places.items()}
    return {url: range(rank, rank + 1) for url, rank in ranks.items()}


def transport_kind(settings: WeightSyncSettings) -> TransportKind:
    """Return what the flags name; see :func:`~slime.config.weight_sync.transport_part`."""
    kind: TransportKind = load(transport_part(settings.sync).target)
    return kind


def create_transport(settings: WeightSyncSettings, colocated_host: bool) -> Transport:
    """Choose a transport from the flags and the placement, also for an adapter that engines load by
    name.

    The factors of such an adapter go to engines on the host of rank 0 through shared memory, to
    others in the body of the request, and with ``--update-weight-transport disk`` through files.

    Args:
        colocated_host: Whether all engines run on the host of rank 0.

    Raises:
        ValueError: A transport with files has no folder, or one that another run uses.
    """
    base = transport_kind(settings).create(settings, colocated_host)
    if settings.adapter is None or settings.adapter_name is None:
        return base
    from slime.weights.transports.adapter import AdapterTransport

    through_folder = transport_kind(settings).through_folder
    folder = Path(settings.disk_dir) if through_folder and settings.disk_dir else None
    return AdapterTransport(
        base,
        settings.adapter_name,
        settings.adapter,
        folder=folder,
        shared=colocated_host and not settings.same_process,
        digests=settings.sync.audit_weights,
        deadline=settings.step_seconds,
        keep_files=settings.sync.update_weight_disk_keep_files,
        written=settings.on_written,
    )


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
    """Return the number of GPUs, including those that ``CUDA_VISIBLE_DEVICES`` hides from this
    process.
    """
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def on_cuda() -> bool:
    """Return whether this process has a CUDA device."""
    import torch

    return torch.cuda.is_available()


def _create_disk(settings: WeightSyncSettings, _: bool) -> Transport:
    from slime.models.fp8_format import layout_of
    from slime.weights.transports.disk import DiskTransport, claimed_folder

    folder, model = claimed_folder(settings)
    return DiskTransport(
        folder,
        model,
        settings.step_seconds,
        settings.sync.update_weight_disk_keep_files,
        settings.on_written,
        layout_of(settings.model, settings.fp8) if settings.fp8 is not None else None,
        settings.rollout_dtype,
    )


DIRECT = TransportKind(_create, many_senders=True)
DISK = TransportKind(_create_disk, through_folder=True)
