"""The settings with which a run goes on after its manager or a rank has died."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.cluster.ray_wait import NoStatus, WaitExpired
from slime.config.parser import read_settings
from slime.plugins.restarts.recovery import actors_of, lost_parts
from slime.plugins.restarts.supervisor import restart_settings

VALUES = {
    "max_restarts": 3,
    "status_timeout": 120.0,
    "save": "outputs/run/checkpoints",
    "run_name": "run",
    "output_dir": "outputs",
}
ENDING = {"max_restarts": 2, "run_name": "run", "output_dir": "outputs"}


def resumed(words: list[str], saved: bool) -> dict[str, Any]:
    """What matters of the arguments with which a run goes on."""
    args, problems = read_settings(words, settings=restart_settings(VALUES, saved))
    assert not problems
    names = ("load", "ckpt_step", "start_rollout_id", "finetune", "lr", *ENDING)
    return {name: getattr(args, name) for name in names}


FIRST = (
    "lr: 1.0\n"
    "load: other\n"
    "ckpt_step: 3\n"
    "start_rollout_id: 0\n"
    "finetune: true\n"
    "max_restarts: 3\n"
    "run_name: first\n"
)
OPTIONS = (
    "--lr 1 --load other --ckpt-step=3 --start-rollout-id 0 --finetune --max-restarts 3 "
    "--run-name first"
)


@pytest.mark.parametrize("given_by", ["words", "--override", "--custom-config-path"])
def test_it_goes_on_from_its_own_snapshot(tmp_path: Path, given_by: str) -> None:
    """Wherever the first start's settings stood: files take precedence over words, so restarts
    would have no end.
    """
    (tmp_path / "first.yaml").write_text(FIRST)
    words = OPTIONS.split() if given_by == "words" else [given_by, str(tmp_path / "first.yaml")]
    none = {"ckpt_step": None, "start_rollout_id": None, "finetune": False}
    assert resumed(words, saved=True) == {"load": VALUES["save"], "lr": 1.0, **none, **ENDING}
    first = {"ckpt_step": 3, "start_rollout_id": 0, "finetune": True}
    assert resumed(words, saved=False) == {"load": "other", "lr": 1.0, **first, **ENDING}


class Status:
    """An actor whose ``status()`` never comes, comes, or is the error of a dead actor."""

    def __init__(self, kind: str) -> None:
        self.kind, self.status = kind, self

    def remote(self) -> Status:
        return self


def lost(patch: pytest.MonkeyPatch, error: Exception, manager: str, *ranks: str) -> list[str]:
    import ray

    def wait(refs: list[Status], num_returns: int, timeout: float) -> Any:
        return [ref for ref in refs if ref.kind != "silent"], [
            ref for ref in refs if ref.kind == "silent"
        ]

    def get(refs: list[Status], timeout: float | None = None) -> list[None]:
        if any(ref.kind == "dead" for ref in refs):
            raise ray.exceptions.ActorDiedError()
        return [None for _ in refs]

    patch.setattr(ray, "wait", wait)
    patch.setattr(ray, "get", get)
    patch.setattr(ray, "is_initialized", lambda: True)
    parts: Any = SimpleNamespace(
        manager=SimpleNamespace(handle=Status(manager)),
        groups=[SimpleNamespace(role="actor", ranks=[Status(rank) for rank in ranks])],
    )
    return lost_parts(actors_of(parts), error)


def test_what_died_or_fell_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lost(monkeypatch, ValueError("code"), "well", "well", "dead") == ["the actor's rank 1"]
    silent = ["the rollout manager (which does not answer)"]
    assert lost(monkeypatch, WaitExpired("slow"), "silent", "well") == silent
    assert lost(monkeypatch, NoStatus("slow"), "silent", "well") == silent
    assert lost(monkeypatch, NoStatus("slow"), "well", "well") == ["an answer (NoStatus)"], (
        "it has come round"
    )
    assert lost(monkeypatch, ValueError("code"), "silent", "well") == [], (
        "busy, and code is to blame"
    )


def test_a_wait_that_is_merely_too_slow_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lost(monkeypatch, WaitExpired("slow"), "well", "well", "well") == []


def test_where_ray_itself_cannot_be_asked_it_is_what_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    def wait(*_: Any, **__: Any) -> Any:
        raise ray.exceptions.RaySystemError("the head is gone")

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "wait", wait)
    actors: Any = {"the rollout manager": Status("well")}
    assert lost_parts(actors, WaitExpired("slow")) == ["the Ray cluster (WaitExpired)"]
    assert lost_parts(actors, ValueError("code")) == []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert lost_parts(actors, WaitExpired("slow")) == [], "nothing was started yet"
