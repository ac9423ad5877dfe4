"""Whole tensors out of FSDP's shards: equal to ``full_tensor``, in few collectives and in bounded
memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quick_processes import start_ranks

from slime.backends import collectives
from slime.engines.process import free_port

pytestmark = pytest.mark.real
SHAPES = [(8, 3), (7, 5), (3,), (2, 2, 2), (1, 4), (9,), (64, 16), (5, 1)]
"""Some with fewer rows than ranks, some that no number of ranks divides."""
LIMITS = [1 << 28, 700, 1]  # bytes of a batch


def _named(mesh: Any, placements: Any) -> list[tuple[str, torch.Tensor]]:
    """Sharded tensors of two dtypes, with plain ones and one of another sharding between them."""
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    tensors: list[tuple[str, torch.Tensor]] = [("first", torch.randn(3))]
    for i, shape in enumerate(SHAPES):
        tensor = torch.randn(shape).to(torch.bfloat16 if i == 4 else torch.float32)
        tensors.append((f"t{i}", distribute_tensor(tensor, mesh, placements)))
        if i % 3 == 0:
            tensors.append((f"plain{i}", torch.randn(4)))
    columns = [Shard(1) if isinstance(p, Shard) else p for p in placements]
    tensors.insert(4, ("columns", distribute_tensor(torch.randn(4, 12), mesh, columns)))
    return tensors


def _rank(rank: int, port: int, output: str) -> None:
    import os

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    calls: list[int] = []
    gather = collectives.all_gather_flat

    def counted(whole: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        calls.append(whole.numel() * whole.element_size())
        return gather(whole, *arguments, **named)

    collectives.all_gather_flat = counted
    found: dict[Any, Any] = {}
    meshes = {
        "one dimension": (init_device_mesh("cpu", (4,)), [Shard(0)]),
        "copies of shards": (init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)]),
        "shards of one rank": (init_device_mesh("cpu", (4, 1)), [Replicate(), Shard(0)]),
    }
    for layout, (mesh, placements) in meshes.items():
        named = _named(mesh, placements)
        want = [(n, t.full_tensor() if hasattr(t, "full_tensor") else t) for n, t in named]
        for limit in LIMITS:
            collectives.BATCH_BYTES = limit
            calls.clear()
            got = [
                (name, tensor.clone()) for name, tensor in collectives.whole_tensors(iter(named))
            ]
            pairs = zip(got, want, strict=True)
            same = [a == b and torch.equal(x, y) and x.dtype == y.dtype for (a, x), (b, y) in pairs]
            found[layout, limit] = {"same": same, "sizes": list(calls)}
    torch.save(found, f"{output}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_batches_of_any_size_give_what_single_gathers_give(tmp_path: Path) -> None:
    start_ranks(_rank, (free_port(), str(tmp_path)), 4, join=True)
    for rank in range(4):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        assert all(all(result["same"]) for result in found.values()), rank
        for layout in ("one dimension", "copies of shards"):
            sizes = [found[layout, limit]["sizes"] for limit in LIMITS]
            # Of one dtype in a row: float32, bfloat16, float32; the tensor that is cut by columns
            # goes alone.
            assert [len(each) for each in sizes] == sorted(len(each) for each in sizes)
            assert len(sizes[0]) <= 5 and len(sizes[-1]) == len(SHAPES)
            # Padding to a multiple of the ranks comes on top of the limit; a larger tensor goes
            # alone.
            assert all(size <= 2 * 700 or size == 64 * 16 * 4 for size in sizes[1])
        assert not any(found["shards of one rank", limit]["sizes"] for limit in LIMITS)


def test_tensors_that_are_not_sharded_are_passed_on_at_once() -> None:
    """The stream is not read ahead: a copy of the whole model would come together otherwise."""
    read: list[int] = []

    def stream() -> Any:
        for i in range(3):
            read.append(i)
            yield f"t{i}", torch.zeros(2)

    for count, (name, _) in enumerate(collectives.whole_tensors(stream())):
        assert name == f"t{count}" and len(read) == count + 1
