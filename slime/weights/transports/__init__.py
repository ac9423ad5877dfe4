"""Ways to bring weights to engines: shared memory or CUDA IPC, a process group, or a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.weights.transports.base import SendResult, Transport

__all__ = ["SendResult", "Transport", "create_transport", "ranks_of_engines", "sync_deadline"]

_DRIVER_MARGIN = 0.9  # of --phase-timeout: a sync ends with an error of its own before the driver gives up


def sync_deadline(args: Any) -> float:
    """Seconds that one step of a sync may take (one bucket on all engines, one control call)."""
    return float(min(args.distributed_timeout_minutes * 60, args.phase_timeout * _DRIVER_MARGIN))


def ranks_of_engines(
    args: Any, urls: Sequence[str], slots: Mapping[str, range], world_size: int, same_host: bool
) -> dict[str, range]:
    """For each engine the training ranks whose memory it reads the weights from; the first of them sends.

    A CUDA IPC handle opens only on the node of its GPU. Each tensor-parallel rank of a colocated engine therefore reads
    from the training rank on its own GPU (:mod:`slime.weights.transports.peers`); all other engines get everything
    from rank 0. Without GPUs the processes of one host that would share a GPU are paired in the same way.

    Args:
        slots: engine URL to its places among the rollout's GPUs, which colocated are the trainer's.
        same_host: all engines run on the host of rank 0.

    Raises:
        ValueError: a colocated engine is on a GPU that no rank is on.
    """
    rank_0 = {url: range(1) for url in urls}
    if not (args.colocate and args.update_weight_transport == "nccl" and world_size > 1):
        return rank_0
    alone = [url for url in urls if url not in slots or slots[url].stop > world_size]
    if not _on_cuda():
        return rank_0 if alone or not same_host else {url: slots[url] for url in urls}
    if alone:
        raise ValueError(
            f"--colocate: no rank of the trainer is on the GPU of engine {alone[0]}; let --rollout-num-gpus be the "
            "number of the trainer's GPUs, or use --update-weight-transport disk"
        )
    return {url: slots[url] for url in urls}


def create_transport(args: Any, colocated_host: bool) -> Transport:
    """Choose a transport from the flags and the placement.

    Args:
        args: reads ``update_weight_mode``, ``update_weight_transport``, ``update_weight_disk_dir``,
            ``update_weight_disk_keep_files``, ``update_weight_delta_encoding``, ``update_weight_delta_checksum``,
            ``custom_update_weight_post_write_path``, ``hf_checkpoint``, ``colocate``,
            ``distributed_timeout_minutes``, ``phase_timeout``.
        colocated_host: all engines run on the host of rank 0. On GPUs IPC is for engines on the *same* GPU
            (``--colocate``, whatever the host): NCCL refuses two ranks on one, and across GPUs it is faster and
            needs no peer access by handle.
    """
    deadline = sync_deadline(args)
    if args.update_weight_transport == "disk":
        return _through_folder(args, deadline)
    own_gpu = _on_cuda() and (args.colocate or (colocated_host and _gpus_of_this_host() == 1))
    if own_gpu or (colocated_host and not _on_cuda()):
        from slime.weights.transports.ipc import IpcTransport

        return IpcTransport(deadline)
    from slime.weights.transports.distributed import DistributedTransport

    return DistributedTransport("nccl" if _on_cuda() else "gloo", deadline)


def _gpus_of_this_host() -> int:
    """Also those that this process does not see (``CUDA_VISIBLE_DEVICES``)."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _on_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _through_folder(args: Any, deadline: float) -> Transport:
    if not args.update_weight_disk_dir:
        raise ValueError(
            "--update-weight-transport disk needs --update-weight-disk-dir: a folder that trainer and engines see"
        )
    model = Path(args.hf_checkpoint).expanduser()
    if not model.is_dir():
        from huggingface_hub import snapshot_download

        model = Path(snapshot_download(args.hf_checkpoint, local_files_only=True))
    folder, keep = Path(args.update_weight_disk_dir), args.update_weight_disk_keep_files
    written = _post_write_hook(args)
    if args.update_weight_mode == "delta":
        from slime.weights.transports.delta import DeltaTransport

        encoding, checksum = args.update_weight_delta_encoding, args.update_weight_delta_checksum
        return DeltaTransport(folder, model, deadline, encoding, checksum, keep, written)
    from slime.weights.transports.disk import DiskTransport

    return DiskTransport(folder, model, deadline, keep, written)


def _post_write_hook(args: Any) -> Any:
    """``--custom-update-weight-post-write-path``: ``fn(args, version_dir, rollout_engines)``."""
    from slime.config.hooks import load_function

    path = args.custom_update_weight_post_write_path
    if path is None:
        return None
    hook = load_function(path)
    return lambda folder, engines: hook(args, str(folder), engines)
