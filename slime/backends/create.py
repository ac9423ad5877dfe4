"""Start one rank of a training backend."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from slime.registry import find

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store
    from transformers import PreTrainedModel

    from slime.backends.base import TrainBackend
    from slime.config.args import Args

LOOPBACK = "lo"
logger = logging.getLogger(__name__)


def create_backend(
    args: Args,
    role: str,
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    local_rank: int = 0,
    preloaded: PreTrainedModel | None = None,
) -> TrainBackend:
    """Join the process group (gloo for CPU tensors, NCCL for CUDA tensors) and build the backend.

    Args:
        role: ``actor`` or ``critic``.
        local_rank: The index of this rank's accelerator among those that it can see.
        preloaded: What the backend's ``read_ahead`` returned.

    Raises:
        ValueError: The backend, role or advantage estimator is unknown.
    """
    from slime.config.algorithm import algorithm_class
    from slime.models.cpu_memory import large_imports

    if role not in ("actor", "critic"):
        raise ValueError(f"role must be actor or critic, not {role!r}")
    # CUDA reads its variables when it is initialized, so nothing above may touch the device. The
    # module of a backend may set some, too.
    if args.deterministic:
        # cuBLAS is deterministic only with a workspace of its own.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    kind = backend_class(args.train_backend)
    with large_imports():
        import torch

        from slime.models.flash_attention import use_if_possible
    # raises an error for an unknown one before the first rollout
    algorithm_class(args.advantage_estimator)
    device = _take_device(local_rank, args.threads_per_process)
    if args.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    kernel = use_if_possible(args.attn_implementation is None, device)
    if rank == 0:
        logger.info("attention over packs: %s", kernel)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    _init_process_group(rank, world_size, master_addr, master_port, device, timeout)
    # Every rank has different random numbers, which are the same in each run. What must be equal on
    # all ranks (a value head) has its own seed.
    torch.manual_seed(args.seed + rank)
    # Only backends with read_ahead take this parameter.
    more = {} if preloaded is None else {"preloaded": preloaded}
    backend: TrainBackend = kind(args, role, rank, world_size, device, **more)
    return backend


def _take_device(local_rank: int, threads: int | None) -> torch.device:
    """Return the accelerator of this rank, or the CPU. There, freed memory and compiled kernels are
    kept within bounds; on CUDA, torch's allocator does that.
    """
    import torch

    from slime.models.cpu_memory import keep_freed_memory, set_compute_variables

    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device
    keep_freed_memory()
    set_compute_variables()
    if threads:
        torch.set_num_threads(threads)
    return torch.device("cpu")


def backend_class(name: str) -> type[Any]:
    """Import a training backend, which takes seconds and no memory of a GPU, and return its class.

    Raises:
        RegistryError: There is no backend of this name.
    """
    from slime.models.cpu_memory import large_imports

    with large_imports():
        found: type[Any] = find("backend", name)
    return found


def _init_process_group(
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    device: torch.device,
    timeout: timedelta,
) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        return
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))  # FSDP's device mesh reads them
    # NCCL reads this once per process. It must be the same on the engines, to which weights are
    # broadcast.
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    if _is_loopback(master_addr) and os.path.isdir(f"/sys/class/net/{LOOPBACK}"):
        # by default gloo listens on the address of the host name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    if world_size > 1:
        # Otherwise every gloo group connects each of its ranks to all others when it is created:
        # 1,000 ranks have 499,500 connections, and as many again for --async-save. A ring or a tree
        # needs only a few per rank.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=_store(rank, world_size, master_addr, master_port, timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


def _is_loopback(host: str) -> bool:
    """Return whether a host name (torchrun gives one) or an address is that of the loopback
    interface.
    """
    addresses = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None)}
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def _store(rank: int, world_size: int, address: str, port: int, timeout: timedelta) -> Store:
    """Return the key-value store for the rendezvous of the ranks.

    It has no authentication. So rank 0 listens on ``address`` only (``init_method="tcp://…"`` would
    listen on all interfaces), and a single rank starts no server. Under torchrun, its agent serves
    the store already.
    """
    from torch.distributed import HashStore, TCPStore

    from slime.weights.transports.peers import serve_store

    if world_size == 1:
        return HashStore()
    if rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return TCPStore(address, port, world_size, False, timeout, wait_for_workers=False)
    return serve_store(address, port, world_size, timeout)
