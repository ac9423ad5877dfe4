"""Start one rank of a training backend."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.backends.base import TrainBackend


def create_backend(
    args: Any,
    role: str,
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    local_rank: int = 0,
) -> TrainBackend:
    """Join the process group (gloo on the CPU; NCCL for CUDA tensors on CUDA) and build the backend.

    Args:
        role: ``actor`` or ``critic``.
        local_rank: index of this rank's accelerator among those it can see.

    Raises:
        ValueError: unknown backend or role.
    """
    if role not in ("actor", "critic"):
        raise ValueError(f"role must be actor or critic, not {role!r}")
    if args.train_backend not in ("fsdp", "megatron"):
        raise ValueError(f"--train-backend {args.train_backend!r} is neither fsdp nor megatron")
    if args.train_backend == "megatron":  # else its communication does not run beside its products
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    import torch

    from slime.models.cpu_memory import keep_freed_memory

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
        if args.threads_per_process:
            torch.set_num_threads(args.threads_per_process)
    if args.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    _init_process_group(args, rank, world_size, master_addr, master_port, device)
    torch.manual_seed(args.seed + rank)
    if args.train_backend == "megatron":
        from slime.backends.megatron.core import prepare, require_cuda

        prepare()
        require_cuda()
        from slime.backends.megatron.backend import MegatronBackend

        return MegatronBackend(args, role, rank, world_size, device)
    from slime.backends.fsdp.backend import FsdpBackend

    return FsdpBackend(args, role, rank, world_size, device)


def _init_process_group(args: Any, rank: int, world_size: int, master_addr: str, master_port: int, device: Any) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        return
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))  # FSDP's device mesh reads them
    # NCCL reads it once per process; the engines' NCCL, which weights are broadcast to, has the same.
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://{master_addr}:{master_port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        device_id=device if device.type == "cuda" else None,
    )
