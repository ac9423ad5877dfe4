"""Actor and critic: what is trained, and whose turn on the accelerator it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from driver_parts import Driver
from make_args import make_args

from slime.backends.token_budget import Measurement
from slime.cluster.rollout_manager import RolloutManager
from slime.cluster.stop_signals import StopRequested
from slime.cluster.train_actor import TrainActor
from slime.cluster.train_group import TrainGroup
from slime.cluster.trainer import SHARE, SHARE_WITH_EXPERTS, memory_share, settle_token_budget
from slime.config.args import Args


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


BEGUN = ["critic begins to score", "actor scores", "critic has finished to score"]
TRAINED = ["critic begins to train", "actor trains", "critic has finished to train"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [*BEGUN, *TRAINED]),
        # the actor shares its place with engines
        ({"colocated": True}, ["actor wakes", *BEGUN, *TRAINED]),
        ({"num_critic_only_steps": 1, "ref_update_interval": 1},
         [*BEGUN[::2], *TRAINED[::2], "actor copies actor to ref"]),
        ({"num_critic_only_steps": 1, "kl_coef": 0.1}, [*BEGUN, *TRAINED[::2]]),
    ],
)  # fmt: skip
def test_with_gpus_of_its_own_the_critic_works_beside_the_actor(
    flags: dict[str, Any], expected: list[str]
) -> None:
    driver = Driver(critic=True, critic_num_nodes=1, **flags)
    assert driver.critic is not None
    driver.critic.metrics = {"train/critic-value_loss": 1.0}
    driver.trainer.train(0, [])
    assert driver.said == expected and driver.trainer.trained == 0
    assert driver.log.pending["train/critic-value_loss"] == 1.0
    logged = ["log-probs"] if "actor scores" in expected else []
    assert driver.critic.given == [["critic's values", *logged]]
    driver.said.clear()
    driver.trainer.sleep()
    assert driver.said == (["actor sleeps"] if flags.get("colocated") else [])


def test_the_actor_gets_the_critics_values_and_both_their_metrics_are_logged() -> None:
    driver = Driver(critic=True)
    assert driver.critic is not None
    driver.critic.metrics, driver.actor.metrics = {"train/value_loss": 1.0}, {"train/loss": 2.0}
    given: list[Any] = []
    train = driver.actor.run
    driver.actor.run = lambda *arguments: given.append(arguments) or train(*arguments)  # type: ignore
    driver.trainer.train(3, ["ref"])  # type: ignore[list-item]
    assert given == [("train", 3, ["ref"], [["critic's values"]])]
    assert driver.log.pending == {"train/value_loss": 1.0, "train/loss": 2.0, "perf/step_time": 0.5}


def test_with_a_kl_penalty_the_critic_gets_the_actors_log_probs_and_the_actor_both() -> None:
    driver = Driver(critic=True, kl_coef=0.1)
    given: dict[str, Any] = {}
    for group in driver.trainer.groups:
        run = group.run
        group.run = lambda *arguments, group=group, run=run: (  # type: ignore[method-assign]
            given.update({group.role: arguments}) or run(*arguments)
        )
    driver.trainer.train(3, ["ref"])  # type: ignore[list-item]
    assert given["critic"] == ("train", 3, ["ref"], [["log-probs"]])
    assert given["actor"] == ("train", 3, ["ref"], [["log-probs", "critic's values"]])
    assert driver.log.pending["perf/log_probs_time"] == 0.25


def test_the_reference_is_copied_every_so_many_rollouts() -> None:
    driver = Driver(ref_update_interval=2)
    for rollout_id in range(4):
        driver.trainer.train(rollout_id, [])
    copies = "actor copies actor to ref"
    assert driver.said == [
        "actor trains",
        "actor trains",
        copies,
        "actor trains",
        "actor trains",
        copies,
    ]


@pytest.mark.parametrize("flags", [{"ref_update_interval": 1}, {"critic": True, "colocated": True}])
def test_a_stop_signal_waits_until_the_rollout_is_trained(flags: dict[str, Any]) -> None:
    """Or a snapshot would hold weights of a rollout that it counts as untrained, and a resumed run
    would repeat it.
    """
    driver = Driver(**flags)
    train, copy = driver.trainer.groups[-1].run, driver.actor.copy_weights
    wake = driver.actor.wake

    def struck(*arguments: Any) -> Any:
        driver.stop.requested = "SIGTERM"
        return train(*arguments)

    def waiting(call: Any) -> Any:
        # as every wait of a real group
        return lambda *arguments: (driver.stop.check(), call(*arguments))[1]

    driver.trainer.groups[-1].run = struck  # type: ignore[method-assign]
    driver.actor.copy_weights, driver.actor.wake = waiting(copy), waiting(wake)  # type: ignore[method-assign]
    driver.trainer.train(0, [])
    assert driver.trainer.trained == 0 and driver.said[-1] in (
        "actor copies actor to ref",
        "actor trains",
    )
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


GIB = 2**30


def gpu_args(**flags: Any) -> Any:
    return make_args(**{"train_dtype": "bfloat16", "deterministic": False, **flags})


class Group:
    """A role's ranks, which find room for so many tokens."""

    def __init__(self, role: str, tokens: list[int]) -> None:
        self.role, self.tokens, self.ranks = role, tokens, [0, 1]
        self.shares: list[float] = []
        self.budgets: tuple[int, int] | None = None

    def measure_memory(self, share: float) -> list[Measurement]:
        self.shares.append(share)
        return [Measurement(tokens, 1024.0, tokens * 1024.0) for tokens in self.tokens]

    def set_token_budgets(self, budgets: dict[str, int]) -> None:
        self.budgets = budgets["max_tokens_per_gpu"], budgets["log_probs_max_tokens_per_gpu"]


class Settled:
    """What becomes of ``args`` where these groups train."""

    def __init__(
        self,
        args: Args,
        groups: list[Group],
        on_gpu: bool = True,
        manifest: dict[str, Any] | None = None,
    ) -> None:
        self.notes: list[str] = []
        self.told: list[tuple[int, int]] = []
        self.turns: list[str] = []
        trainer: Any = SimpleNamespace(
            actor=groups[0],
            groups=groups,
            take_turn=lambda group: self.turns.append(group.role),
            log=SimpleNamespace(note=self.notes.append),
        )
        manager: Any = SimpleNamespace(
            call=lambda what, method, budgets: self.told.append(tuple(budgets.values()))
        )
        parts: Any = SimpleNamespace(args=args, begin=SimpleNamespace(manifest=manifest))
        placement: Any = SimpleNamespace(on_gpu=on_gpu)
        settle_token_budget(parts, placement, trainer, manager)
        self.args = parts.args


def test_everyone_packs_by_what_the_tightest_rank_has_room_for() -> None:
    args = gpu_args(rollout_max_response_len=8192)
    actor, critic = Group("actor", [40_000, 20_000]), Group("critic", [30_000, 50_000])
    settled = Settled(args, [actor, critic])
    expected = 20_000 - 20_000 % 256
    assert settled.args.max_tokens_per_gpu == settled.args.log_probs_max_tokens_per_gpu == expected
    assert args.max_tokens_per_gpu != expected, "what was parsed is left as it is"
    assert actor.budgets == critic.budgets == (expected, expected) and settled.told == [
        (expected, expected)
    ]
    assert actor.shares == critic.shares == [SHARE]
    assert settled.turns == ["critic", "actor"], "the actor is awake at the end"
    (note,) = settled.notes
    assert f"--max-tokens-per-gpu {expected}" in note and "1 KiB" in note and "4 rank" in note
    assert "warning" not in note


def test_a_given_budget_for_passes_without_a_backward_stays() -> None:
    settled = Settled(gpu_args(log_probs_max_tokens_per_gpu=50_000), [Group("actor", [20_000])])
    assert settled.told == [(19_968, 50_000)]
    assert settled.args.log_probs_max_tokens_per_gpu == 50_000


def test_it_warns_of_samples_that_may_not_fit() -> None:
    settled = Settled(gpu_args(rollout_max_response_len=8192), [Group("actor", [5000])])
    assert "8192 tokens" in settled.notes[0]


@pytest.mark.parametrize(
    "flags, on_gpu",
    [
        (dict(max_tokens_per_gpu=512), True),
        (dict(micro_batch_size=2), True),
        (dict(deterministic=True), True),
        (dict(train_dtype="float32"), True),
        ({}, False),
    ],
)
def test_a_given_flag_and_a_cpu_keep_the_budget_of_the_flags(
    flags: dict[str, Any], on_gpu: bool
) -> None:
    args, group = gpu_args(**flags), Group("actor", [20_000])
    settled = Settled(args, [group], on_gpu)
    assert settled.args is args
    assert not settled.notes and not settled.told and not group.shares and group.budgets is None


@pytest.mark.parametrize("world_size, expected", [(2, 12_345), (4, 19_968)])
def test_a_resume_on_as_many_gpus_packs_as_before(world_size: int, expected: int) -> None:
    manifest = {"world_size": world_size, "settings": {"max_tokens_per_gpu": 12_345}}
    group = Group("actor", [20_000])
    settled = Settled(gpu_args(), [group], manifest=manifest)
    assert settled.args.max_tokens_per_gpu == expected and group.budgets == (expected, expected)
    assert bool(group.shares) == (world_size != 2), (
        "measured only where the number of GPUs has changed"
    )


def test_experts_leave_more_room(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"num_experts": 8}}')
    assert memory_share(str(tmp_path)) == SHARE_WITH_EXPERTS < SHARE


def test_ranks_and_rollout_manager_pack_by_it() -> None:
    rank: Any = SimpleNamespace(
        args=gpu_args(), backend=SimpleNamespace(device=SimpleNamespace(type="cpu"))
    )
    manager: Any = SimpleNamespace(args=gpu_args())
    budgets = {"max_tokens_per_gpu": 5120, "log_probs_max_tokens_per_gpu": 9216}
    TrainActor.set_token_budgets(rank, budgets)
    RolloutManager.set_token_budgets(manager, budgets)
    assert (rank.backend.packing.max_tokens, rank.backend.packing.forward_max_tokens) == (
        5120,
        9216,
    )
    for args in (rank.args, rank.backend.args, manager.args):
        assert (args.max_tokens_per_gpu, args.log_probs_max_tokens_per_gpu) == (5120, 9216)
    assert TrainActor.measure_memory(rank, SHARE) is None, "there is nothing to measure on a CPU"
