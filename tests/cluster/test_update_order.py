"""Colocated: who gives memory back, and who takes it, in which order around a weight update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.cluster.run import Run
from slime.cluster.train_group import TrainGroup


class Group:
    def __init__(self, role: str, said: list[str]) -> None:
        self.role, self.said = role, said

    def sleep(self, keep_weights: bool = False) -> None:
        self.said.append(f"{self.role} sleeps but for its weights" if keep_weights else f"{self.role} sleeps")

    def wake(self) -> None:
        self.said.append(f"{self.role} wakes")

    def update_weights(self, *arguments: Any, **more: Any) -> dict[str, float]:
        self.said.append("send")
        return {"pause_seconds": 0.0, "nbytes": 0, "density": 1.0, "audit_seconds": 0.0}

    def train(self, *arguments: Any) -> dict[str, Any]:
        self.said.append(f"{self.role} trains")
        return {"metrics": {}, "timings": {}, "values": []}

    def save(self, folder: Any) -> None:
        self.said.append(f"{self.role} saves")

    def finish_save(self) -> None: ...

    def copy_weights(self, source: str, target: str) -> None:
        self.said.append(f"{self.role}: {source} to {target}")

    def memory(self) -> dict[str, float]:
        return {}

    host = "127.0.0.1"


class Anything:
    """A Ray actor whose every method may be called."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: None)


def colocated_run(said: list[str], colocated: bool, **flags: Any) -> Any:
    @contextmanager
    def phase(name: str) -> Iterator[None]:
        yield

    def onload(tags: tuple[str, ...]) -> None:
        said.append(f"engines take {', '.join(tags)}")

    run: Any = Run.__new__(Run)
    run.args = SimpleNamespace(
        offload_train=colocated, offload_rollout=colocated, audit_weights=False, check_weight_update_equal=False,
        keep_old_actor=False, update_weights_interval=1, num_critic_only_steps=0, ref_update_interval=None,
        lr_warmup_iters=0, lr_warmup_fraction=None, critic_lr_warmup_iters=None, audit_threshold=None,
    )  # fmt: skip
    vars(run.args).update(flags)
    run.actor, run.critic = Group("actor", said), Group("critic", said)
    run.engine_urls, run.trained, run.first_rollout, run.attempt = ["http://127.0.0.1:1"], None, 0, 0
    run._checked_equal, run._told_of_zero_lr, run.pending, run._progress = True, False, {}, None
    run.display = SimpleNamespace(phase=phase, timers=phase)
    run.phase = phase
    run.manager = Anything()
    run.manager.onload = SimpleNamespace(remote=onload)
    run.manager_call = lambda *a, **k: None
    run.faults = SimpleNamespace(
        targets=lambda: run.engine_urls, slots={}, served=lambda urls: None,
        survive=lambda call, urls, replace=False: (call(urls), urls),
    )  # fmt: skip
    return run


def updated(colocated: bool) -> list[str]:
    """What is said in one update."""
    said: list[str] = []
    colocated_run(said, colocated).update_weights()
    return said


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ["actor sleeps", "critic wakes", "critic trains", "critic sleeps", "actor wakes", "actor trains"]),
        ({"num_critic_only_steps": 1}, ["actor sleeps", "critic wakes", "critic trains"]),
        (
            {"num_critic_only_steps": 1, "ref_update_interval": 1},
            ["actor sleeps", "critic wakes", "critic trains", "critic sleeps", "actor wakes", "actor: actor to ref"],
        ),
        ({"offload_train": False}, ["critic trains", "actor trains"]),
    ],
)
def test_actor_and_critic_take_turns(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], expected: list[str]
) -> None:
    monkeypatch.setattr("slime.cluster.run.gap_alarm", lambda *_: None)
    said: list[str] = []
    colocated_run(said, True, **flags).train(0, {"refs": []})
    assert said == expected


def test_who_is_saved_is_awake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also when a signal ends the run while engines generate, and trainers sleep."""
    said: list[str] = []
    run = colocated_run(said, True, save=str(tmp_path), async_save=True, save_hf=None, seed=0)
    run._open_snapshot, run.version, run.placement = None, "0.0", SimpleNamespace(slots=SimpleNamespace(train=1))
    monkeypatch.setattr(Run, "_settings", lambda _: {})
    run.save(0)
    assert said == ["critic sleeps", "actor wakes", "actor saves", "actor sleeps", "critic wakes", "critic saves"]


def test_a_group_that_sleeps_or_is_awake_already_is_left_alone() -> None:
    """Megatron's ranks, say, would gather weights that have no memory."""
    calls: list[tuple[Any, ...]] = []
    group: Any = TrainGroup.__new__(TrainGroup)
    group.resident, group._all = "everything", lambda *call: calls.append(call)
    group.wake()
    group.sleep(keep_weights=True)
    group.sleep()
    group.sleep()
    group.wake()
    group.wake()
    assert calls == [("sleep", True), ("sleep", False), ("wake",)]


def test_optimizer_and_gradients_make_room_before_engines_take_weights() -> None:
    assert updated(colocated=True) == [
        "critic sleeps",
        "actor wakes",
        "actor sleeps but for its weights",
        "engines take weights",
        "send",
        "actor sleeps",
        "critic sleeps",
        "engines take kv_cache, cuda_graph",
    ]


def test_apart_nobody_sleeps() -> None:
    assert updated(colocated=False) == ["send"]
