"""Trainer and engine take turns with the memory of one place."""

from __future__ import annotations

import asyncio

import pytest

from slime.cluster.engine_calls import flush_when_idle
from slime.engines.sglang_api import EngineError

PHASES = ("rollout", "offload", "wake_up", "train", "update_weights", "sleep", "onload")


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_later_iteration_uses_no_more_memory_than_an_earlier_one(runner, flags) -> None:
    result = runner.run(*flags, "--colocate", "--num-rollout", 12)
    assert result.code == 0, result.output
    steps = result.metrics()
    for row in steps:
        assert {f"memory/{phase}/process" for phase in PHASES} <= row.keys()
        assert {f"perf/{phase}_time" for phase in PHASES} <= row.keys()
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-4  # weights survive each turn
    for phase in PHASES:  # a model of 1 MB: anything kept per step beyond rounding would show
        used = [row[f"memory/{phase}/process"] for row in steps]
        # the caches of kernels (cpu_memory.py) are full by then
        assert used[11] <= used[7] * 1.02, (phase, used)
    assert runner.wait_gone() == []


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_actor_and_critic_take_turns_in_the_place_of_the_engine(runner, flags) -> None:
    """PPO with a first rollout that trains the critic alone, and snapshots: every phase finds who
    it needs awake.
    """
    ppo = [
        "--advantage-estimator",
        "ppo",
        "--num-critic-only-steps",
        1,
        "--save-interval",
        1,
        "--kl-coef",
        "0.01",
    ]
    result = runner.run(*flags, "--colocate", *ppo, "--ref-update-interval", 1)
    assert result.code == 0, result.output
    first, *others = result.metrics()
    assert "train/loss" not in first and first["train/critic-grad_norm"] > 0
    for row in others:
        assert row["train/grad_norm"] > 0 and row["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert (
        result.folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    ).read_text().strip() == "2"
    assert runner.wait_gone() == []


class Engine:
    """Counts down its requests, and refuses a flush once more after the last has gone, as SGLang
    may.
    """

    url = "http://engine"

    def __init__(self, loads: list[int]) -> None:
        self.loads = loads
        self.refusals = 1
        self.flushed = False

    async def load(self) -> dict[str, int]:
        return {
            "running": self.loads.pop(0) if len(self.loads) > 1 else self.loads[0],
            "waiting": 0,
            "tokens": 0,
        }

    async def flush_cache(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise EngineError("400: requests are pending")
        self.flushed = True


def test_an_engine_is_idle_before_it_gives_memory_back() -> None:
    engine = Engine([2, 1, 0])
    asyncio.run(flush_when_idle(engine))  # type: ignore[arg-type]
    assert engine.flushed and engine.loads == [0]
    busy = Engine([1])
    with pytest.raises(EngineError, match=r"not idle .*\(1 running"):
        asyncio.run(flush_when_idle(busy, deadline=0.05))  # type: ignore[arg-type]
    assert not busy.flushed
