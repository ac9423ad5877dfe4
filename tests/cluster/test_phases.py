"""The loops of ``train.py`` and ``train_async.py`` over the real driver, and when something is
due.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from driver_parts import Driver

from slime.cluster.rollout_manager import RolloutBatch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train

QUIET = ("trained", "add_phases", "begin_update", "end_update", "actor has saved", "save_state")


def looped(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> list[str]:
    """What is done in ``train.train``, but for the calls that only keep accounts."""

    monkeypatch.setattr(train, "run_loop", lambda args, loop: loop(args, driver.run))
    train.train(driver.args)
    return [what for what in driver.said if what not in QUIET]


def test_the_order_of_the_synchronous_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = Driver(num_rollout=3, eval_interval=2, save_interval=3, save=str(tmp_path))
    assert looped(monkeypatch, driver) == [
        "actor sends 0.0", "eval",
        "generate", "actor trains", "actor sends 0.1",
        "generate", "actor trains", "actor sends 0.2", "eval",
        "generate", "actor trains", "actor saves", "actor sends 0.3", "eval",
    ]  # fmt: skip
    steps = [step for key, step, _ in driver.rows if key == "rollout/step"]
    evaluations = [
        (step, row["eval/gsm8k"]) for key, step, row in driver.rows if key == "eval/step"
    ]
    assert steps == [0, 1, 2] and evaluations == [(0, 0.5), (2, 0.5), (3, 0.5)]
    assert driver.actor_manager.arguments["trained"] == [(0,), (1,), (2,)]


def test_the_order_of_a_colocated_step(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(colocated=True, num_rollout=1, skip_eval_before_train=True)
    assert looped(monkeypatch, driver)[-9:] == [
        "generate", "offload", "actor wakes", "actor wakes", "actor trains",
        "actor wakes", "actor sleeps but for its weights", "onload weights", "actor sends 0.1",
        "actor sleeps", "onload kv_cache, cuda_graph",
    ][-9:]  # fmt: skip


def test_each_steps_metrics_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(num_rollout=2)
    looped(monkeypatch, driver)
    rows = [row for key, _, row in driver.rows if key == "rollout/step"]
    assert [row["rollout/id"] for row in rows] == [0.0, 1.0]
    for row in rows:
        assert row["perf/step_time"] > 0 and 0 <= row["perf/wait_time_ratio"] <= 1
        assert {"perf/rollout_time", "perf/train_time", "perf/update_weights_time"} <= row.keys()
    assert driver.log.pending == {}


def test_nothing_trains_without_a_trainer() -> None:
    driver = Driver()
    driver.trainer.actor, driver.trainer.groups = None, []
    driver.run.train(0, driver.run.generate(0))
    driver.run.update_weights()
    assert driver.said == ["generate"] and driver.trainer.trained is None


def test_a_learning_rate_of_zero_is_told_once() -> None:
    driver = Driver()
    driver.actor.metrics = {"train/lr-pg_0": 0.0}
    for rollout_id in range(3):
        driver.run.train(rollout_id, driver.run.generate(rollout_id))
    assert driver.printed.getvalue().count("the learning rate of the actor was 0") == 1


def test_a_warning_is_shown_while_the_driver_waits_and_once() -> None:
    driver = Driver()
    for _ in range(2):
        driver.log.show_status({"phase": "generate", "warnings": ["the reward server is away"]})
    driver.log.add_rollout(RolloutBatch([], {}, [], ["the reward server is away", "another"]))
    said = driver.printed.getvalue()
    assert said.count("warning: the reward server is away") == 1
    assert said.count("warning: another") == 1


@pytest.mark.parametrize(
    "flags",
    [{}, {"lr_warmup_iters": 5}, {"lr_warmup_fraction": 0.5}, {"critic_lr_warmup_iters": 5}],
    ids=str,
)
def test_a_first_step_without_effect_is_told_unless_a_flag_asks_for_a_warm_up(
    flags: dict[str, float],
) -> None:
    driver = Driver(**flags)
    driver.actor.metrics = {"train/lr-pg_0": 0.0}
    driver.run.train(0, driver.run.generate(0))
    assert ("actor was 0" in driver.printed.getvalue()) == (not flags)


def test_a_gap_between_engine_and_trainer_is_told() -> None:
    driver = Driver()
    driver.actor.metrics = {"train/train_rollout_logprob_abs_diff": 50.0}
    driver.run.train(0, driver.run.generate(0))
    assert "differ by 50" in driver.printed.getvalue()


# --- when
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "expected"), [(None, []), (1, [0, 1, 2, 3, 4]), (2, [1, 3, 4]), (5, [4]), (9, [4])]
)
def test_something_is_due_every_so_many_rollouts_and_after_the_last(
    interval: int | None, expected: list[int]
) -> None:
    run = Driver(num_rollout=5).run
    assert [rollout_id for rollout_id in range(5) if run.is_due(rollout_id, interval)] == expected


@pytest.mark.parametrize(
    ("first_rollout", "interval", "skip", "expected"),
    [
        (0, 2, False, True),
        (0, 2, True, False),
        (0, None, False, False),
        (2, 2, True, True),  # interrupted between step 1 and its evaluation
        (3, 2, False, False),
        (4, None, False, False),
        (4, 9, False, True),  # after the last
    ],
)
def test_evaluations_before_the_first_step(
    first_rollout: int, interval: int, skip: bool, expected: bool
) -> None:
    driver = Driver(
        first_rollout=first_rollout,
        num_rollout=4,
        eval_interval=interval,
        skip_eval_before_train=skip,
    )
    assert driver.run.evaluates_at_start() is expected
