"""Actor and critic: what is trained, and whose turn on the accelerator it is."""

from __future__ import annotations

from typing import Any

import pytest
from driver_parts import Driver

from slime.cluster.stop_signals import StopRequested
from slime.cluster.train_group import TrainGroup


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ["actor sleeps", "critic wakes", "critic trains", "critic sleeps", "actor wakes", "actor trains"]),
        ({"num_critic_only_steps": 1}, ["actor sleeps", "critic wakes", "critic trains"]),
        (
            {"num_critic_only_steps": 1, "ref_update_interval": 1},
            [
                "actor sleeps", "critic wakes", "critic trains", "critic sleeps", "actor wakes",
                "actor copies actor to ref",
            ],
        ),
        (
            {"kl_coef": 0.1},
            [
                "critic sleeps", "actor wakes", "actor scores", "actor sleeps", "critic wakes", "critic trains",
                "critic sleeps", "actor wakes", "actor trains",
            ],
        ),
        ({"offload_train": False}, ["critic trains", "actor trains"]),
        ({"offload_train": False, "kl_coef": 0.1}, ["actor scores", "critic trains", "actor trains"]),
        (
            {"offload_train": False, "kl_coef": 0.1, "num_critic_only_steps": 1}, ["actor scores", "critic trains"],
        ),
    ],
)  # fmt: skip
def test_actor_and_critic_take_turns(flags: dict[str, Any], expected: list[str]) -> None:
    driver = Driver(colocated=True, critic=True, **flags)
    driver.trainer.train(0, [])
    assert driver.said == expected and driver.trainer.trained == 0


def test_the_actor_gets_the_critics_values_and_both_their_metrics_are_logged() -> None:
    driver = Driver(critic=True)
    assert driver.critic is not None
    driver.critic.metrics, driver.actor.metrics = {"train/value_loss": 1.0}, {"train/loss": 2.0}
    given: list[Any] = []
    train = driver.actor.train
    driver.actor.train = lambda *arguments: given.append(arguments) or train(*arguments)  # type: ignore
    driver.trainer.train(3, ["ref"])  # type: ignore[list-item]
    assert given == [(3, ["ref"], [["critic's values"]])]
    assert driver.log.pending == {"train/value_loss": 1.0, "train/loss": 2.0, "perf/step_time": 0.5}


def test_with_a_kl_penalty_the_critic_gets_the_actors_log_probs_and_the_actor_both() -> None:
    driver = Driver(critic=True, kl_coef=0.1)
    given: dict[str, Any] = {}
    for group in driver.trainer.groups:
        train = group.train
        group.train = lambda *arguments, group=group, train=train: (  # type: ignore[method-assign]
            given.update({group.role: arguments}) or train(*arguments)
        )
    driver.trainer.train(3, ["ref"])  # type: ignore[list-item]
    assert given["critic"] == (3, ["ref"], [["log-probs"]])
    assert given["actor"] == (3, ["ref"], [["log-probs", "critic's values"]])
    assert driver.log.pending["perf/log_probs_time"] == 0.25


def test_the_reference_is_copied_every_so_many_rollouts() -> None:
    driver = Driver(ref_update_interval=2)
    for rollout_id in range(4):
        driver.trainer.train(rollout_id, [])
    copies = "actor copies actor to ref"
    assert driver.said == ["actor trains", "actor trains", copies, "actor trains", "actor trains", copies]


@pytest.mark.parametrize("flags", [{"ref_update_interval": 1}, {"critic": True, "colocated": True}])
def test_a_stop_signal_waits_until_the_rollout_is_trained(flags: dict[str, Any]) -> None:
    """Or a snapshot would hold weights of a rollout that it counts as untrained, and a resumed run would repeat it."""
    driver = Driver(**flags)
    train, copy = driver.trainer.groups[-1].train, driver.actor.copy_weights
    wake = driver.actor.wake

    def struck(*arguments: Any) -> Any:
        driver.stop.requested = "SIGTERM"
        return train(*arguments)

    def waiting(call: Any) -> Any:
        return lambda *arguments: (driver.stop.check(), call(*arguments))[1]  # as every wait of a real group

    driver.trainer.groups[-1].train = struck  # type: ignore[method-assign]
    driver.actor.copy_weights, driver.actor.wake = waiting(copy), waiting(wake)  # type: ignore[method-assign]
    driver.trainer.train(0, [])
    assert driver.trainer.trained == 0 and driver.said[-1] in ("actor copies actor to ref", "actor trains")
    with pytest.raises(StopRequested):
        driver.stop.check()


@pytest.mark.parametrize(
    ("critic", "kl_coef", "first"),
    [(False, 0.0, "actor wakes"), (True, 0.0, "critic wakes"), (True, 0.1, "actor wakes")],
)
def test_who_works_first_wakes_first(critic: bool, kl_coef: float, first: str) -> None:
    driver = Driver(colocated=True, critic=critic, kl_coef=kl_coef)
    driver.trainer.wake()
    assert driver.said[-1] == first and "memory/wake_up/gib" in driver.log.pending


def test_a_group_that_sleeps_or_is_awake_already_is_left_alone() -> None:
    """Megatron's ranks, say, would gather weights that have no memory."""
    calls: list[tuple[Any, ...]] = []
    group: Any = TrainGroup.__new__(TrainGroup)
    group.resident, group.ask_all = (
        "everything",
        lambda what, method, *arguments: calls.append((method.__name__, *arguments)),
    )
    group.wake()
    group.sleep(keep_weights=True)
    group.sleep()
    group.sleep()
    group.wake()
    group.wake()
    assert calls == [("sleep", True), ("sleep", False), ("wake",)]
