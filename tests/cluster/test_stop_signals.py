"""What Ctrl-C does at once, and what it waits for."""

from __future__ import annotations

import os
import signal

import pytest

from slime.cluster.stop_signals import StopRequested, StopSignals


def test_a_stop_that_waits_for_a_step_says_so_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Without a word for the minutes of a large step, the user would press again, and lose the step."""
    with StopSignals() as stop:
        with stop.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            stop.check()
            said = capfd.readouterr().err
            assert said == "SIGINT: the run stops when its step is trained or saved (press again to kill)\n"
        with pytest.raises(StopRequested, match="SIGINT"):
            stop.check()


def test_a_stop_that_can_begin_at_once_is_said_by_the_shutdown(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StopRequested, match="SIGTERM"):
            stop.check()
    assert capfd.readouterr().err == ""
