"""Layers of ``--tp-comm-overlap``: which models have them, and, on two GPUs, their results and gradients.

On the CPU their results are compared in whole models (``test_megatron_layouts.py``).
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from slime.engines.process import free_port

pytestmark = pytest.mark.megatron

RANKS, OUT, IN = 2, 512, 256


@pytest.mark.parametrize("overlap", [False, True])
def test_the_flag_chooses_the_layers(overlap: bool) -> None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from slime.backends.megatron.model import layer_spec
    from slime.backends.megatron.overlapped_linear import OverlappedColumn, OverlappedRow

    column, row = (OverlappedColumn, OverlappedRow) if overlap else (ColumnParallelLinear, RowParallelLinear)
    config: Any = SimpleNamespace(multi_latent_attention=False)
    settings = {"tp_comm_overlap": overlap, "num_attention_heads": 4, "num_query_groups": 2}
    for with_experts in (False, True):
        parts = layer_spec(config, settings, with_experts).submodules
        attention = parts.self_attention.submodules
        mlp = parts.mlp.submodules.shared_experts.submodules if with_experts else parts.mlp.submodules
        assert (attention.linear_qkv, attention.linear_proj) == (column, row)
        assert (mlp.linear_fc1, mlp.linear_fc2) == (column, row)


def test_layers_with_adapters_overlap_too() -> None:
    from slime.backends.megatron.lora_layers import LoraColumn, LoraRow, attach
    from slime.backends.megatron.overlapped_linear import OverlappedColumn, OverlappedRow

    for plain, adapted in ((OverlappedColumn, LoraColumn), (OverlappedRow, LoraRow)):
        module: Any = plain.__new__(plain)
        torch.nn.Module.__init__(module)
        attach(module, {}, 1.0, (), 1)
        assert isinstance(module, plain) and isinstance(module, adapted)


def test_it_needs_sequence_parallelism() -> None:
    from slime.backends.megatron.config import _layout_problems

    def problems(tp: int, **settings: Any) -> list[str]:
        return _layout_problems({"tp_comm_overlap": True, **settings}, SimpleNamespace(tp=tp, etp=1))  # type: ignore[arg-type]

    assert "add --sequence-parallel" in problems(2)[0]
    assert problems(2, sequence_parallel=True) == problems(2, num_experts=4) == problems(1) == []


def test_ranks_on_several_nodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.backends.megatron import overlapped_linear

    def gather(found: list[str], own: str, group: Any) -> None:
        found[:] = ["first", "second"]

    monkeypatch.setattr(overlapped_linear.dist, "all_gather_object", gather)
    with pytest.raises(overlapped_linear.MegatronError, match=r"several nodes \(first, second\)"):
        overlapped_linear.require_one_node(SimpleNamespace(size=lambda: 2))  # type: ignore[arg-type]


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} CUDA GPUs that can read one another")
def test_two_gpus_compute_what_one_computes() -> None:
    multiprocessing.spawn(_compare, (free_port("127.0.0.1"),), nprocs=RANKS)


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _compare(rank: int, port: int) -> None:
    """Column layer, then row layer, over packs of changing length: every rank computes the whole in float32."""
    from slime.backends.megatron.overlapped_linear import GatheredLinear, ScatteredLinear

    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    try:
        group = dist.group.WORLD
        for step, tokens in enumerate([256, 1024, 512, 4096, 64] * 20):
            generator = torch.Generator("cuda").manual_seed(step)
            sizes = ((tokens, 1, IN), (OUT, IN), (IN, OUT), (tokens, 1, IN))
            x, first, second, grad = (
                torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator) for size in sizes
            )
            part = [tensor.chunk(RANKS, dim)[rank] for tensor, dim in ((x, 0), (first, 0), (second, 1), (grad, 0))]
            mine = [tensor.clone().requires_grad_(i < 3) for i, tensor in enumerate(part)]
            output = ScatteredLinear.apply(GatheredLinear.apply(mine[0], mine[1], group), mine[2], group)
            output.backward(mine[3])
            whole = [tensor.float().requires_grad_() for tensor in (x, first, second)]
            expected = (whole[0] @ whole[1].t()) @ whole[2].t()
            expected.backward(grad.float())
            found = [output, *(gradient(tensor) for tensor in mine[:3])]
            wanted = [expected, *(gradient(tensor) for tensor in whole)]
            for name, ours, theirs, dim in zip(
                ("output", "x", "first", "second"), found, wanted, (0, 0, 0, 1), strict=True
            ):
                theirs = theirs.chunk(RANKS, dim)[rank]
                gap = float((ours.float() - theirs).norm() / theirs.norm())
                assert gap < 0.01, (name, step, tokens, gap)
    finally:
        dist.destroy_process_group()
