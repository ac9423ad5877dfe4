"""The command line with which a run goes on after its manager or a rank has died."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime.cluster.restart import _lost
from slime.cluster.supervisor import command_line
from slime.cluster.wait import WaitExpired
from slime.cluster.waiting import NoStatus

VALUES = {"max_restarts": 3, "save": "outputs/run/checkpoints", "run_name": "run", "output_dir": "outputs"}
ENDING = ["--max-restarts", "2", "--run-name", "run", "--output-dir", "outputs"]


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["train.py", "--lr", "1e-3"], ["train.py", "--lr", "1e-3"]),
        (["train.py", "--load", "hf", "--ckpt-step", "3", "--lr", "1"], ["train.py", "--load", "hf", "--lr", "1"]),
        (["train.py", "--ckpt-step=3", "--finetune", "--lr", "1"], ["train.py", "--lr", "1"]),
        (["-u", "train.py", "--start-rollout-id", "0"], ["-u", "train.py"]),
    ],
)
def test_it_goes_on_from_its_own_snapshot(words: list[str], kept: list[str]) -> None:
    assert command_line(words, VALUES, saved=True) == [*kept, *ENDING, "--load", VALUES["save"]]


def test_without_a_snapshot_it_begins_where_it_began() -> None:
    words = ["train.py", "--load", "other", "--ckpt-step", "3"]
    assert command_line(words, VALUES, saved=False) == [*words, *ENDING]


class Status:
    """An actor whose ``status()`` never comes, comes, or is the error of a dead actor."""

    def __init__(self, kind: str) -> None:
        self.kind, self.status = kind, self

    def remote(self) -> Status:
        return self


def lost(patch: pytest.MonkeyPatch, error: Exception, manager: str, *ranks: str) -> list[str]:
    import ray

    def wait(refs: list[Status], num_returns: int, timeout: float) -> Any:
        return [ref for ref in refs if ref.kind != "silent"], [ref for ref in refs if ref.kind == "silent"]

    def get(ref: Status) -> None:
        if ref.kind == "dead":
            raise ray.exceptions.ActorDiedError()

    patch.setattr(ray, "wait", wait)
    patch.setattr(ray, "get", get)
    group = SimpleNamespace(role="actor", ranks=[Status(rank) for rank in ranks])
    run: Any = SimpleNamespace(manager=Status(manager), groups=[group])
    return _lost(run, error)


def test_what_died_or_fell_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lost(monkeypatch, ValueError("code"), "well", "well", "dead") == ["the actor's rank 1"]
    silent = ["the rollout manager (which does not answer)"]
    assert lost(monkeypatch, WaitExpired("slow"), "silent", "well") == silent
    assert lost(monkeypatch, NoStatus("slow"), "silent", "well") == silent
    assert lost(monkeypatch, NoStatus("slow"), "well", "well") == ["an answer (NoStatus)"], "it has come round"
    assert lost(monkeypatch, ValueError("code"), "silent", "well") == [], "busy, and code is to blame"


def test_a_wait_that_is_merely_too_slow_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lost(monkeypatch, WaitExpired("slow"), "well", "well", "well") == []
