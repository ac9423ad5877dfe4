"""How a run ends: well, by a signal, with an error, or to be restarted."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driver_parts import Driver

from slime.cluster import run as end_module
from slime.cluster.rollout_manager import RolloutBatch
from slime.cluster.run import NothingTrained, RunEnd, snapshot_before_stop
from slime.cluster.snapshots import StartingPoint
from slime.cluster.start import Parts
from slime.cluster.stop_signals import StopRequested
from slime.observability.run_dir import RunDir
from slime.plugins.restarts import recovery


class Ended(BaseException):
    """Stands for the end of the process."""


def parts_of(driver: Driver, folder: Path) -> Parts:
    begin, started = StartingPoint(), {"manager": driver.manager, "run": driver.run}
    return Parts(driver.args, RunDir(folder), begin, driver.log, driver.stop, **started)


class Ending:
    """The end of a run, in which the last commit fails with ``failure``, and what happens then."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.driver, self.did = Driver(), list[str]()
        self.failure: Exception = RuntimeError("disk")
        self.lost: list[str] = []
        self.driver.args = self.driver.args.with_values(max_restarts=2)
        self.end = RunEnd(parts_of(self.driver, folder))

        def fail() -> None:
            raise self.failure

        def leave() -> None:
            raise Ended

        patch.setattr(self.driver.snapshots, "commit", fail)
        patch.setattr(
            end_module,
            "shut_down",
            lambda _, failed: self.did.append(f"shutdown, failed: {failed}"),
        )
        patch.setattr(
            end_module,
            "snapshot_before_stop",
            lambda _: self.did.append("snapshot before the stop"),
        )
        patch.setattr(
            recovery,
            "lost_parts",
            lambda actors, error: self.lost if error is self.failure else [],
        )
        patch.setattr(self.end.recovery, "leave", leave)
        patch.setattr(type(end_module.REPORTS), "attached", True)


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ending:
    return Ending(monkeypatch, tmp_path)


def test_a_rank_that_dies_while_it_writes_the_last_snapshot_is_a_loss(ending: Ending) -> None:
    """With ``--async-save`` this is when the last save is waited for."""
    ending.lost, ending.driver.snapshots.saved = ["the actor's rank 1"], 3
    with pytest.raises(Ended):
        ending.end.__exit__(None, None, None)
    assert ending.did == ["shutdown, failed: True"]
    words = (
        "lost the actor's rank 1: going on from the snapshot of rollout 3 (1 more restarts, "
        "--max-restarts)"
    )
    assert words in ending.driver.printed.getvalue()


def test_another_error_of_the_end_is_raised_after_the_shutdown(ending: Ending) -> None:
    with pytest.raises(RuntimeError, match="disk"):
        ending.end.__exit__(None, None, None)
    assert ending.did == ["shutdown, failed: True"], "which reports on engines and names the logs"


def test_a_signal_during_the_end_stops_in_order(ending: Ending) -> None:
    ending.failure = StopRequested("SIGTERM")
    with pytest.raises(SystemExit) as raised:
        ending.end.__exit__(None, None, None)
    assert raised.value.code == 143
    assert ending.did == ["snapshot before the stop", "shutdown, failed: False"]


def test_a_stop_whose_snapshot_fails_is_a_failure(
    ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise slime doctor would say that the user has stopped the run, and nothing of the step
    that is lost.
    """

    def fail(_: Parts) -> None:
        raise RuntimeError("a rank died")

    monkeypatch.setattr(end_module, "snapshot_before_stop", fail)
    ended: list[tuple[str, object]] = []
    state = SimpleNamespace(end=lambda status, error=None: ended.append((status, error)))
    monkeypatch.setattr(ending.driver.log.display, "state", state)
    error = StopRequested("SIGINT")
    with pytest.raises(RuntimeError, match="a rank died") as raised:
        ending.end.__exit__(StopRequested, error, None)
    assert ended == [("failed", raised.value)] and ending.did == ["shutdown, failed: True"]


@pytest.mark.parametrize("lost", [[], ["the rollout manager"]])
def test_an_error_of_the_start_ends_what_was_started(ending: Ending, lost: list[str]) -> None:
    ending.end.parts.run, ending.lost = None, lost
    with pytest.raises(Ended if lost else RuntimeError), ending.end:
        raise ending.failure
    assert ending.did == ["shutdown, failed: True"]
    assert ("going on from where it began" in ending.driver.printed.getvalue()) == bool(lost)


def test_a_run_that_is_through_commits_closes_the_ledger_and_prints(tmp_path: Path) -> None:
    driver = Driver(save=str(tmp_path), async_save=True)
    driver.run.save(2)
    driver.trainer.trained = 2
    end_module.complete(driver.run)
    assert driver.snapshots.saved == 2 and driver.actor_manager.arguments["close_account"] == [(2,)]
    assert "ledger: 3 groups asked for: 3 trained" in driver.printed.getvalue()


@pytest.mark.parametrize(
    ("shares", "fails"), [([1.0, 1.0], True), ([1.0, 0.75], False), ([], False)]
)
def test_a_run_whose_samples_all_failed_has_failed(shares: list[float], fails: bool) -> None:
    driver = Driver()
    for share in shares:
        driver.log.add_rollout(RolloutBatch([], {"rollout/failed_ratio": share}))
    with pytest.raises(NothingTrained) if fails else contextlib.nullcontext():
        end_module.complete(driver.run)
    assert "ledger" in driver.printed.getvalue(), "the summary comes first"


# --- a stop
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("colocated", "saved"), [(True, 1), (True, 2), (False, 1)])
@pytest.mark.parametrize("async_save", [False, True])
def test_at_a_stop_engines_end_before_a_trainer_wakes_to_save(
    tmp_path: Path, colocated: bool, saved: int, async_save: bool
) -> None:
    """There is no room for both; where nothing is left to save, nobody wakes. The snapshot is
    complete before the shutdown, also with ``--async-save``."""
    driver = Driver(colocated, critic=True, trained=2, save=str(tmp_path), async_save=async_save)
    driver.snapshots.saved, driver.stop.requested = saved, "SIGTERM"
    snapshot_before_stop(parts_of(driver, tmp_path))
    turns = [
        "critic sleeps",
        "actor wakes",
        "actor saves",
        "actor sleeps",
        "critic wakes",
        "critic saves",
    ]
    saves = ["end_engines", *turns] if colocated else ["actor saves", "critic saves"]
    assert driver.said == (
        [] if saved == 2 else [*saves, "save_state", "actor has saved", "critic has saved"]
    )
    assert driver.snapshots.saved == 2 and driver.stop.is_deferred


@pytest.mark.parametrize("case", ["not started", "no --save", "nothing trained"])
def test_a_stop_with_nothing_to_save(tmp_path: Path, case: str) -> None:
    driver = Driver(
        trained=None if case == "nothing trained" else 2,
        save=None if case == "no --save" else str(tmp_path),
    )
    driver.snapshots.saved, driver.stop.requested = None, "SIGINT"
    parts: Any = parts_of(driver, tmp_path)
    parts.run = None if case == "not started" else parts.run
    snapshot_before_stop(parts)
    assert driver.said == [] and "SIGINT" in driver.printed.getvalue()


def test_a_run_that_failed_prints_its_message_last_and_keeps_the_traceback_in_its_log(
    ending: Ending,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(ending.driver.log.display, "run_dir", RunDir(tmp_path))
    ending.failure = RuntimeError("the disk is full:\n- /data\nmake room")
    with pytest.raises(RuntimeError) as raised, ending.end:
        raise ending.failure
    sys.excepthook(raised.type, raised.value, raised.tb)
    place, frame, *message = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/logs/driver.log" in place and __file__ in frame
    assert message == ["RuntimeError: the disk is full:", "- /data", "make room"]
    log = (tmp_path / "logs" / "driver.log").read_text()
    assert "Traceback" in log and "make room" in log
    other = ValueError("of something else")
    sys.excepthook(type(other), other, None)
    assert capsys.readouterr().err == "ValueError: of something else\n"
