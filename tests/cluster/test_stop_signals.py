"""What Ctrl-C does at once, and what it waits for."""

from __future__ import annotations

import os
import signal

import pytest

from slime.cluster.stop_signals import FORWARDED, REPORTS, StopRequested, StopSignals


def test_a_stop_that_waits_for_a_step_says_so_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Without a word for the minutes of a large step, the user would press again, and lose the
    step.
    """
    with StopSignals() as stop:
        with stop.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            stop.check()
            said = capfd.readouterr().err
            assert (
                said
                == "SIGINT: the run stops when its step is trained or saved (press again to kill)\n"
            )
        with pytest.raises(StopRequested, match="SIGINT"):
            stop.check()


def test_a_stop_that_can_begin_at_once_is_said_by_the_shutdown(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StopRequested, match="SIGTERM"):
            stop.check()
    assert capfd.readouterr().err == ""


def test_a_second_signal_ends_the_process_with_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr("slime.cluster.stop_signals.end_at_once", ended.append)
    with StopSignals():
        os.kill(os.getpid(), signal.SIGINT)
        assert ended == []
        os.kill(os.getpid(), signal.SIGINT)
    assert ended == [128 + signal.SIGINT]


def test_a_signal_that_the_supervisor_forwards_as_well_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C reaches every process of the group, and the supervisor, which is one of them, forwards
    it.
    """
    ended: list[int] = []
    monkeypatch.setattr("slime.cluster.stop_signals.end_at_once", ended.append)
    monkeypatch.setattr(type(REPORTS), "attached", True)
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), FORWARDED[signal.SIGINT])
        assert ended == [] and stop.requested == "SIGINT"
        os.kill(os.getpid(), FORWARDED[signal.SIGINT])
    assert ended == [128 + signal.SIGINT]


def test_a_part_that_defers_the_stop_does_not_end_the_deferral_around_it() -> None:
    with StopSignals() as stop, stop.deferred():
        with stop.deferred():
            pass
        os.kill(os.getpid(), signal.SIGINT)
        stop.check()
