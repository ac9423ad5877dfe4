"""Traces of the trainer's phases: which are written when, and that torch's own reader finds the
phases in them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from slime.backends.train_loop import PhaseTimer
from slime.observability.profiler import Profiler


def profiler_of(
    folder: Path,
    rank: int = 0,
    profiled: range = range(1, 2),
    targets: Sequence[str] = ("train_overall",),
    memory_until: int = 0,
) -> Profiler:
    return Profiler(f"actor-{rank}", folder, profiled, targets, memory_until, folder)


def train(profiler: Profiler, rollouts: int) -> None:
    for rollout_id in range(rollouts):
        with profiler.rollout(rollout_id):
            timer = PhaseTimer(profiler)
            for name in ("ref_log_probs", "data_preprocess", "actor_train"):
                with timer.phase(name):
                    torch.ones(8, 8) @ torch.ones(8, 8)
            assert list(timer.seconds) == ["ref_log_probs", "data_preprocess", "actor_train"]


def phases_in(file: Path) -> set[str]:
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert "aten::mm" in names
    return names & {"ref_log_probs", "data_preprocess", "actor_train"}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["train_overall"], {"train_overall": {"ref_log_probs", "data_preprocess", "actor_train"}}),
        (
            ["train_actor", "train_log_probs"],
            {"train_actor": {"actor_train"}, "train_log_probs": {"ref_log_probs"}},
        ),
        (
            ["train_overall", "train_actor"],
            {"train_overall": {"ref_log_probs", "data_preprocess", "actor_train"}},
        ),
    ],
)
def test_the_phases_that_were_asked_for(
    tmp_path: Path, targets: list[str], expected: dict[str, set[str]]
) -> None:
    train(profiler_of(tmp_path, targets=targets), 3)
    files = {file.name.split("-")[3]: file for file in tmp_path.iterdir()}
    assert {name: phases_in(file) for name, file in files.items()} == expected
    assert all(file.name.endswith("-000001.json.gz") for file in files.values()), (
        "of rollout 1 alone"
    )


def test_nothing_without_the_flag(tmp_path: Path) -> None:
    train(profiler_of(tmp_path, profiled=range(0)), 3)
    assert not any(tmp_path.iterdir())


def test_a_failed_phase_ends_the_profile(tmp_path: Path) -> None:
    profiler = profiler_of(tmp_path, rank=1, profiled=range(9))
    with pytest.raises(ZeroDivisionError), profiler.rollout(0):
        _ = 1 / 0
    with profiler.rollout(1):
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert [file.name for file in tmp_path.iterdir()] == [
        "train-actor-1-train_overall-000001.json.gz"
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA allocations")
def test_memory_of_the_first_rollouts(tmp_path: Path) -> None:
    import pickle

    profiler = profiler_of(tmp_path, memory_until=2)
    for rollout_id in range(3):
        with profiler.rollout(rollout_id):
            torch.ones(1 << 20, device="cuda").sum().item()
        assert (tmp_path / "memory-actor-0.pickle").exists() == (rollout_id >= 1)
    assert pickle.loads((tmp_path / "memory-actor-0.pickle").read_bytes())["segments"]
