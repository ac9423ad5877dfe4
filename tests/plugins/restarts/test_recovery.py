"""When training ranks are replaced while the engines stay, and when the whole run is restarted
instead.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driver_parts import Driver
from make_args import make_args

from slime.checkpoint.snapshot import Snapshot
from slime.cluster.snapshots import StartingPoint
from slime.cluster.start import Parts
from slime.cluster.stop_signals import StopRequested
from slime.observability.run_dir import RunDir
from slime.plugins.restarts import recovery
from slime.plugins.restarts.recovery import (
    MOST_WITHOUT_PROGRESS,
    Restarts,
    TrainingRanks,
    again,
)

RANKS = ["the actor's rank 1", "the critic's rank 0 (which does not answer)"]
SNAPSHOT = Snapshot(Path("iter_0000003"), {"rollout_id": 3, "attempt": 0})  # type: ignore[typeddict-item]


def obstacle(lost: list[str], snapshot: Snapshot | None, engines: bool, **flags: Any) -> str | None:
    parts = SimpleNamespace(args=make_args().with_values(**flags), urls=["http://e"] * engines)
    restarts = Restarts(parts)  # type: ignore[arg-type]
    restarts.lost = lost
    return restarts.obstacle(snapshot)


def test_lost_ranks_of_a_run_with_a_snapshot_are_replaced() -> None:
    assert obstacle(RANKS, SNAPSHOT, engines=True) is None
    assert obstacle(["an answer (NoStatus)"], SNAPSHOT, engines=True) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"lost": [*RANKS, "the rollout manager"]}, "rollout manager"),
        ({"lost": ["the Ray cluster (RaySystemError)"]}, "RaySystemError"),
        ({"snapshot": None}, "no snapshot"),
        ({"engines": False}, "has none"),
        ({"rollout_external_engine_addrs": ["10.0.0.1:1"]}, "--rollout-external-engine-addrs"),
        ({"colocate": True}, "--colocate"),
        ({"offload_train": True}, "--colocate"),
        ({"data_source_path": "mine.Source"}, "--data-source-path"),
        ({"rollout_function_path": "mine.rollout"}, "--rollout-function-path"),
        ({"load_debug_rollout_data": "r.pt"}, "--rollout-function-path"),
        ({"replay_schedule": "schedule.jsonl"}, "--replay-schedule"),
    ],
)
def test_what_makes_a_restart_necessary_is_named(change: dict[str, Any], why: str) -> None:
    case = {"lost": RANKS, "snapshot": SNAPSHOT, "engines": True} | change
    assert why in (obstacle(**case) or "")


def test_a_snapshot_in_between_is_progress() -> None:
    ranks = TrainingRanks()
    for snapshot, hopeless in (
        (3, False),
        (3, False),
        (3, False),
        (5, False),
        (5, False),
        (5, False),
        (5, True),
    ):
        ranks.note_loss_after(snapshot, "the actor's rank 1")
        assert ranks.hopeless is hopeless


def test_each_return_to_a_snapshot_is_a_new_attempt() -> None:
    """The engines still hold weights of the previous one, with the same numbers of steps."""
    first = again(StartingPoint(), SNAPSHOT)
    second = again(first, SNAPSHOT)
    assert (first.trained, first.first_rollout, first.attempt, first.resumes) == (3, 4, 1, True)
    assert (second.first_rollout, second.attempt) == (4, 2)


class Recovering:
    """A run that resumed from the snapshot of rollout 3, whose ranks are lost; ``started`` counts
    new ones.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.driver, self.started = Driver(trained=3), 0
        begin = StartingPoint(SNAPSHOT, True, 3, 4, 1)
        given = {
            "manager": self.driver.manager,
            "urls": ["http://127.0.0.1:1"],
            "run": self.driver.run,
        }
        self.parts = Parts(
            self.driver.args, RunDir(folder), begin, self.driver.log, self.driver.stop, **given
        )
        self.restarts = Restarts(self.parts)
        self.lost, self.answers, self.failure = RANKS, True, list[Exception]()
        patch.setattr(recovery, "lost_parts", lambda actors, error: list(self.lost))
        patch.setattr(recovery, "answers", lambda actor: self.answers)
        patch.setattr(type(recovery.REPORTS), "attached", True)
        patch.setattr(recovery, "start_ranks_again", self._start)

    def _start(self, parts: Parts, begin: StartingPoint) -> Any:
        self.started += 1
        parts.run = None
        if self.failure:
            raise self.failure.pop()
        parts.begin, parts.run = (
            begin,
            SimpleNamespace(args=self.driver.args, snapshots=SimpleNamespace(saved=begin.trained)),
        )  # type: ignore[assignment]
        return parts.run

    def recover(self, error: Exception | None = None) -> Any:
        return self.restarts.replace(error or RuntimeError("connection closed by peer"))

    @property
    def printed(self) -> str:
        return self.driver.printed.getvalue()


@pytest.fixture
def recovering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recovering:
    return Recovering(monkeypatch, tmp_path)


def test_the_run_goes_on_and_counts_it(recovering: Recovering) -> None:
    assert recovering.recover() is recovering.parts.run is not None
    assert recovering.parts.begin.attempt == 2 and recovering.restarts.lost == []
    assert recovering.driver.log.pending["perf/trainer_restart_count"] == 1
    assert "rollout 3" in recovering.printed


def test_without_progress_it_ends_in_a_restart(recovering: Recovering) -> None:
    assert all(recovering.recover() for _ in range(MOST_WITHOUT_PROGRESS))
    assert recovering.recover() is None
    assert recovering.started == MOST_WITHOUT_PROGRESS and recovering.restarts.lost == RANKS
    assert "3 times" in recovering.printed


@pytest.mark.parametrize("case", ["a rank does not start", "a frozen manager"])
def test_what_fails_is_restarted_as_a_whole(recovering: Recovering, case: str) -> None:
    """Also if the failure itself would end the run: what was lost decides."""
    if case == "a frozen manager":
        recovering.answers = False
    else:
        recovering.failure = [ValueError("first line\nno memory")]
    assert recovering.recover() is None
    why = (
        "the rollout manager does not answer"
        if case == "a frozen manager"
        else "ValueError: no memory"
    )
    assert f"the engines cannot stay while training ranks are replaced: {why}" in recovering.printed
    assert recovering.restarts.lost == RANKS and recovering.parts.run is recovering.driver.run


@pytest.mark.parametrize("case", ["code failed", "stopped", "no supervisor"])
def test_what_is_no_loss_is_left_alone(
    recovering: Recovering, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    if case == "code failed":
        recovering.lost = []
    if case == "no supervisor":
        monkeypatch.setattr(type(recovery.REPORTS), "attached", False)
    assert recovering.recover(StopRequested("SIGINT") if case == "stopped" else None) is None
    assert recovering.started == 0 and recovering.printed == "" and recovering.restarts.lost == []


def test_a_stop_while_ranks_are_replaced_saves_nothing(recovering: Recovering) -> None:
    recovering.failure = [StopRequested("SIGINT")]
    with pytest.raises(StopRequested):
        recovering.recover()
    assert recovering.parts.run is None
