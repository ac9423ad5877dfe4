"""The scheduling code on a simulated clock: nobody starves, nothing is lost or too old, and the
figures are sane.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import async_simulation as benchmark
from async_simulation import MODES, Filtered, Tail, gains

from slime.plugins.tools.plan import simulation
from slime.plugins.tools.plan.simulated_engines import (
    H200_CURVE,
    Engines,
    SimulatedLoop,
    SpeedCurve,
)
from slime.plugins.tools.plan.simulation import SYNCHRONOUS, Mode, simulate

SMALL = Tail(engines=2, slots=16, batch=8, samples=4, steps=12, median=256)


@pytest.mark.parametrize("mode", [SYNCHRONOUS, *MODES], ids=lambda mode: mode.name)
def test_what_is_asked_is_trained_in_that_order_so_slow_prompts_do_not_starve(mode: Mode) -> None:
    run = simulate(SMALL, mode, 2e-4)
    for first in (SMALL.batch * SMALL.samples, len(run.trained) // 2, len(run.trained)):
        trained = fmean(run.lengths[index] for index in run.trained[:first])
        asked = fmean(run.lengths[index] for index in run.asked[:first])
        assert trained == pytest.approx(asked, rel=0.02)
    assert sorted(run.trained) == run.asked, "at the drain, both are the same multiset"


def test_taking_what_is_finished_first_would_starve_the_slow_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The measure sees it: the same pool, but judging groups as they finish."""

    def quickest_first(*words: Any) -> simulation.StandingPool:
        pool = standing_pool(*words)
        pool.deterministic = False
        return pool

    standing_pool = simulation.StandingPool
    monkeypatch.setattr(simulation, "StandingPool", quickest_first)
    run = simulate(SMALL, Mode("fully asynchronous"), 2e-4)
    half = len(run.trained) // 2
    trained = fmean(run.lengths[index] for index in run.trained[:half])
    assert trained < 0.98 * fmean(run.lengths[index] for index in run.asked[:half])


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_with_a_filter_every_group_is_trained_or_dropped(mode: Mode) -> None:
    run = simulate(SMALL, mode, 2e-4, Filtered)
    assert len(run.trained) == SMALL.steps * SMALL.batch * SMALL.samples
    assert run.trained == sorted(run.trained), "in the order of admission"
    groups = {index // SMALL.samples for index in run.trained}
    assert 0.5 < len(groups) / (max(groups) + 1) < 0.7
    admission = simulation.Admission(1, mode.buffer, mode.interval, mode.staleness)
    assert max(run.staleness) <= admission.bound


@settings(max_examples=12, deadline=None)
@given(
    batch=st.integers(1, 6),
    buffer=st.integers(0, 5),
    interval=st.integers(1, 4),
    spare=st.none() | st.integers(0, 5),
    drains=st.booleans(),
    drop_share=st.floats(0, 0.7),
    sigma=st.floats(0.1, 1.5),
    seed=st.integers(0, 2**20),
    train_seconds=st.floats(1e-6, 1e-2),
)
def test_no_trained_token_is_older_than_the_bound(
    batch: int,
    buffer: int,
    interval: int,
    spare: int | None,
    drains: bool,
    drop_share: float,
    sigma: float,
    seed: int,
    train_seconds: float,
) -> None:
    staleness = None if spare is None else interval - 1 + spare
    setting = Tail(2, 8, batch, 2, 10, median=64, sigma=sigma, seed=seed)

    class SomeFiltered(Filtered):
        pass

    SomeFiltered.drop_share = drop_share
    mode = Mode("any", "groups", buffer, interval, staleness, drains)
    run = simulate(setting, mode, train_seconds, SomeFiltered)
    assert max(run.staleness) <= simulation.Admission(batch, buffer, interval, staleness).bound
    assert run.trained == sorted(run.trained)
    assert len(run.trained) == 10 * batch * 2


@pytest.mark.slow
def test_modes_gain_in_their_order_and_a_seed_repeats_itself() -> None:
    modes = (MODES[0], *MODES[2:4])
    rows = gains(SMALL, modes)
    assert rows == gains(SMALL, modes)
    over = {name: row["over_synchronous"] for name, row in rows.items()}
    assert 1 > over["one-step"] > over["buffered"] > over["fully asynchronous"] > 1 / 3
    assert rows["one-step"]["staleness_max"] == 1
    assert [row["several_versions"] > 0 for row in rows.values()] == [False, False, True], (
        "only the last mixes weights"
    )


@pytest.mark.parametrize(("running", "rate"), H200_CURVE)
def test_the_engine_decodes_at_the_measured_speed(running: int, rate: float) -> None:
    loop = SimulatedLoop()

    async def go() -> None:
        engines = Engines(1, SpeedCurve())
        await asyncio.gather(*(engines.generate(500) for _ in range(running)))

    try:
        loop.run_until_complete(go())
        assert 500 * running / loop.time() == pytest.approx(rate, rel=1e-6)
    finally:
        loop.close()


def test_starts_and_updates_keep_the_other_requests_of_an_engine_waiting() -> None:
    """Four requests of 100 tokens: 4 x 2 s to start, 1 s of update and 4 x 3 s to refill, around
    100 decode steps.
    """
    loop = SimulatedLoop()
    curve = SpeedCurve(((1, 1.0), (4, 4.0)))  # a step takes a second

    async def go() -> None:
        engines = Engines(1, curve, start_seconds=2.0)
        requests = asyncio.gather(*(engines.generate(100) for _ in range(4)))
        await asyncio.sleep(50.0)
        await engines.pause(1.0, refill_seconds=3.0)
        await requests

    try:
        loop.run_until_complete(go())
        assert loop.time() == pytest.approx(4 * 2 + 1 + 4 * 3 + 100)
    finally:
        loop.close()


@pytest.mark.slow
def test_all_parts_end_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--parts gain --engines 2 --slots 16 --batch 4 --samples 2 --steps 3 --median 64 --seeds 1"
    )
    benchmark.main(words.split())
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["setting"]["batch"] == 4
    assert set(result["gain"]) == {mode.name for mode in MODES}
    cost = benchmark.scheduling_cost(8, least_groups=64)
    assert cost["groups"] == 128 and cost["microseconds_per_group"] > 0
