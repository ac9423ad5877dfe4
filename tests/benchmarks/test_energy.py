"""The energy of a step, from a counter that a test moves."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import energy
import pytest


def test_a_step_has_the_energy_since_the_one_before_it() -> None:
    steps, joules = 0, 0.0
    meter = energy.StepEnergy(lambda: steps, lambda: joules)
    for spent in (50_000.0, 9_000.0, 8_000.0, 8_500.0):  # the first step compiles
        meter.look()
        joules += spent
        steps += 1
        meter.look()
    assert meter.kilojoules(warmup=1) == {"steps": [9.0, 8.0, 8.5], "median": 8.5}
    assert meter.kilojoules(warmup=4) == {}


def test_a_run_whose_metrics_cannot_be_read_yet_is_measured_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0

    def steps() -> int:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise ValueError("half a line")
        return 2

    monkeypatch.setattr(energy, "INTERVAL_SECONDS", 0.001)
    with energy.StepEnergy(steps, lambda: 7.0) as meter:
        while len(meter.joules) < 2:
            pass
    assert meter.kilojoules(warmup=1) == {"steps": [0.0], "median": 0.0}


def test_nothing_is_measured_without_a_counter() -> None:
    with energy.StepEnergy(lambda: 1, None) as meter:
        pass
    assert meter.kilojoules(warmup=1) == {}
