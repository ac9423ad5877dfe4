"""Host memory and blocked time of a snapshot, per rank; ``pytest -s`` prints what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fsdp_helpers import save_tiny_qwen3
from launch import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
MIB = 2**20
SLACK = 48 * MIB
"""What allocators keep and threads need, whatever the size of the state."""


@pytest.mark.parametrize(
    ("backend", "world"),
    [pytest.param("megatron", 2, marks=pytest.mark.long), ("fsdp", 2)],
)
def test_a_save_takes_less_memory_than_the_state_of_the_rank(
    backend: str, world: int, tmp_path: Path
) -> None:
    """Nothing is gathered: a save keeps one tensor beside the state, ``--async-save`` one copy of
    it, which stays for the next one. Every rank writes about as much as every other."""
    shape = dict(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=6, head_dim=64, vocab_size=24000
    )
    paths = {"model": save_tiny_qwen3(tmp_path / "model", **shape), "output": tmp_path / "output"}
    paths["output"].mkdir()
    run_ranks("memory_ranks:measure", world, paths, world, backend, {}, seconds=500)
    ranks = [
        json.loads((paths["output"] / f"rank{rank}.json").read_text()) for rank in range(world)
    ]
    for rank, found in enumerate(ranks):
        report(backend, world, rank, found)
    for found in ranks:
        assert found["save_growth"] < 0.2 * found["state_bytes"] + SLACK
        assert found["take_growth"] < 1.2 * found["state_bytes"] + SLACK
        assert found["first_async_growth"] < 0.2 * found["state_bytes"] + SLACK
        assert found["later_async_growth"] < 0.2 * found["state_bytes"] + SLACK
        assert found["load_growth"] < 0.2 * found["state_bytes"] + SLACK
        assert found["written_bytes"] < 1.5 * sum(other["written_bytes"] for other in ranks) / world


def report(backend: str, world: int, rank: int, found: dict[str, Any]) -> None:
    state = found["state_bytes"]
    grown = {
        name: f"{found[f'{name}_growth'] / MIB:.0f} MiB"
        for name in ("save", "take", "first_async", "later_async", "load")
    }
    blocked = ", ".join(
        f"{name} {found[f'{name}_async_blocked_seconds'] / (state / 2**30):.2f} s per GiB "
        f"({found[f'{name}_async_blocked_cpu_seconds'] / (state / 2**30):.2f} on the CPU)"
        for name in ("first", "later")
    )
    written = found["written_bytes"]
    print(
        f"{backend}, rank {rank} of {world}: state {state / MIB:.0f} MiB, written "
        f"{written / MIB:.0f} MiB, memory growth {grown}, save {found['save_seconds']:.2f} s, "
        f"--async-save blocks: {blocked}"
    )


def test_the_sum_for_30b_on_four_gpus() -> None:
    """Qwen3-30B-A3B in bfloat16, EP4 on four GPUs of 140 GB: what a rank holds, and what a save
    adds to it.
    """
    layers, experts, hidden, width, heads, groups, head = 48, 128, 2048, 768, 32, 4, 128
    dense = 2 * 151936 * hidden + layers * (
        hidden * head * (2 * heads + 2 * groups) + hidden * experts
    )
    of_experts = layers * experts * 3 * hidden * width / 4
    weights, optimizer = 2 * (dense + of_experts), 12 * (dense / 4 + of_experts)
    gradients = 2 * (dense + of_experts)
    largest = experts / 4 * 2 * hidden * width * 4  # float32, one layer's gate and up
    gib = 2.0**30
    print(
        f"weights {weights / gib:.1f} + gradients {gradients / gib:.1f} + optimizer "
        f"{optimizer / gib:.1f} = {(weights + gradients + optimizer) / gib:.1f} GiB a GPU; a save "
        f"adds nothing there and {largest / gib:.2f} GiB of host memory a rank, --async-save "
        f"{(weights + optimizer) / gib:.1f} GiB at most"
    )
    assert (weights + gradients + optimizer) / gib < 125
    assert largest / gib < 1
