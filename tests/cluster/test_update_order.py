"""Colocated: who gives memory back, and who takes it, in which order around a weight update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from slime.cluster.run import Run


class Group:
    def __init__(self, role: str, said: list[str]) -> None:
        self.role, self.said = role, said

    def sleep(self, keep_weights: bool = False) -> None:
        self.said.append(f"{self.role} sleeps but for its weights" if keep_weights else f"{self.role} sleeps")

    def update_weights(self, *arguments: Any, **more: Any) -> dict[str, float]:
        self.said.append("send")
        return {"pause_seconds": 0.0, "nbytes": 0, "density": 1.0, "audit_seconds": 0.0}

    def memory(self) -> dict[str, float]:
        return {}

    host = "127.0.0.1"


def updated(colocated: bool) -> list[str]:
    """What is said in one update."""
    said: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        yield

    def onload(tags: tuple[str, ...]) -> None:
        said.append(f"engines take {', '.join(tags)}")

    run: Any = Run.__new__(Run)
    run.args = SimpleNamespace(
        offload_train=colocated, offload_rollout=colocated, audit_weights=False, check_weight_update_equal=False,
        keep_old_actor=False, update_weights_interval=1,
    )  # fmt: skip
    run.actor, run.critic = Group("actor", said), Group("critic", said)
    run.engine_urls, run.trained, run.first_rollout, run.attempt = ["http://127.0.0.1:1"], None, 0, 0
    run._checked_equal, run.pending = True, {}
    run.display = SimpleNamespace(phase=phase, timers=phase)
    run.phase = phase
    run.manager = SimpleNamespace(onload=SimpleNamespace(remote=onload))
    run.manager_call = lambda *a, **k: None
    run.faults = SimpleNamespace(
        targets=lambda: run.engine_urls, slots={}, served=lambda urls: None,
        survive=lambda call, urls, replace=False: (call(urls), urls),
    )  # fmt: skip
    run.update_weights()
    return said


def test_optimizer_and_gradients_make_room_before_engines_take_weights() -> None:
    assert updated(colocated=True) == [
        "actor sleeps but for its weights",
        "critic sleeps",
        "engines take weights",
        "send",
        "actor sleeps",
        "critic sleeps",
        "engines take kv_cache, cuda_graph",
    ]


def test_apart_nobody_sleeps() -> None:
    assert updated(colocated=False) == ["send"]
