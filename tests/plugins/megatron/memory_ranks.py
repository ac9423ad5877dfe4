"""What the ranks of ``test_snapshot_memory.py`` run."""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any


class PeakMemory:
    """The growth of this process's resident memory inside the block, in bytes; the kernel keeps the
    peak.
    """

    def __enter__(self) -> PeakMemory:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
        self.base = peak_bytes()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.growth = peak_bytes() - self.base


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def measure(
    rank: int,
    ports: Any,
    paths: dict[str, Path],
    world: int,
    backend_name: str,
    megatron: dict[str, Any],
) -> None:
    """Write ``rank<i>.json``: bytes of this rank's own state, memory and seconds of saves and of a
    load.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch.distributed as dist
    from fsdp_helpers import make_args
    from megatron_ranks import rank_batch

    from slime.backends.create import create_backend
    from slime.backends.train_loop import train_on_rollout

    dtype = "bfloat16" if backend_name == "megatron" else "float32"
    args = make_args(
        paths["model"],
        train_backend=backend_name,
        world_size=world,
        train_dtype=dtype,
        async_save=True,
    )
    args.megatron = dict(megatron)
    backend: Any = create_backend(args, "actor", rank, world, "127.0.0.1", ports.get(1))
    train_on_rollout(
        backend, rank_batch(0, 0, backend.data_parallel_rank, backend.data_parallel_size)
    )
    found: dict[str, Any] = {"state_bytes": state_bytes(backend)}
    args.async_save = False
    backend.save(paths["output"] / "warm")  # imports and pools that stay
    with PeakMemory() as memory:  # after the first step
        backend.take_save_memory()
        backend.state.memory._taking.join()
    found["take_growth"] = memory.growth
    for name, in_background in (("save", False), ("first_async", True), ("later_async", True)):
        folder = paths["output"] / name
        args.async_save = in_background
        with PeakMemory() as memory:
            dist.barrier()
            start, cpu = time.perf_counter(), time.thread_time()
            files = backend.save(folder)
            found[f"{name}_blocked_seconds"] = time.perf_counter() - start
            found[f"{name}_blocked_cpu_seconds"] = time.thread_time() - cpu
            if in_background:
                files = backend.saving.finish(300)
            found[f"{name}_seconds"] = time.perf_counter() - start
        found[f"{name}_growth"] = memory.growth
        found["written_bytes"] = sum(file["size"] for file in files)
    dist.barrier()
    with PeakMemory() as memory:
        backend.load(paths["output"] / "save")
    found["load_growth"] = memory.growth
    (paths["output"] / f"rank{rank}.json").write_text(json.dumps(found))


def state_bytes(backend: Any) -> int:
    """Parameters, main parameters and moments that this rank holds."""
    from slime.backends.collectives import local

    if hasattr(backend, "chunks"):
        parameters = [tensor for _, tensor in backend.weights.tensors()]
        optimizer = backend.optimizer.tensors()
    else:
        parameters = [parameter for _, parameter in backend.named_parameters]
        optimizer = list(backend.optimizer.tensors().values())
    storages = {}
    for tensor in [*parameters, *optimizer]:
        own = local(tensor.detach())
        storages[own.data_ptr()] = own.numel() * own.element_size()
    return sum(storages.values())
