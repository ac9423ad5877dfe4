"""A critic with ranks of its own trains beside the actor, with the numbers of one that takes turns
with it."""

from __future__ import annotations

import pytest
from test_inline import numbers

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
PPO = ("--advantage-estimator", "ppo", "--num-steps-per-rollout", 2)
ONE = ("--critic-num-gpus-per-node", 1)


def test_the_numbers_are_those_of_a_critic_that_takes_turns(runner, flags) -> None:
    """Each needs what the other computes: log-probs for the KL penalty, and values. Either goes on
    from the snapshot of the other."""
    more = ("--kl-coef", "0.05", "--num-critic-only-steps", 1, "--num-rollout", 4)
    both = (*flags, *PPO, *more, "--save-interval", 2, "--save")
    apart = runner.run(*both, "apart", *ONE, name="apart")
    assert apart.code == 0, apart.output
    turns = runner.inline(*both, "turns", "--load", "apart", "--ckpt-step", 1, name="turns")
    assert turns.code == 0, turns.output
    whole = runner.inline(*both, "whole", name="whole")
    assert numbers(apart.folder) == numbers(whole.folder)
    assert numbers(turns.folder)[-2:] == numbers(whole.folder)[-2:]
    assert runner.wait_gone() == []


@pytest.mark.long
def test_the_asynchronous_loop(runner, flags) -> None:
    script = "train_async.py"
    apart = runner.run(*flags, *PPO, *ONE, name="apart", script=script)
    assert apart.code == 0, apart.output
    turns = runner.inline(*flags, *PPO, name="turns", script=script)
    assert numbers(apart.folder) == numbers(turns.folder)
    assert "train/critic-value_loss" in apart.metrics()[-1]


@pytest.mark.long
def test_each_role_has_its_own_number_of_ranks(runner, flags) -> None:
    """Samples are divided otherwise for either role, and each loads what another number wrote."""
    more = ("--kl-coef", "0.05", "--num-rollout", 4, "--save-interval", 2, "--save")
    ranks = ("--actor-num-gpus-per-node", "--critic-num-gpus-per-node")
    first = runner.run(*(*flags, *PPO, *more, "first", ranks[0], 2, ranks[1], 1), name="first")
    assert first.code == 0, first.output
    again = ("--load", "first", "--ckpt-step", 1, ranks[0], 1, ranks[1], 2)
    second = runner.run(*flags, *PPO, *more, "second", *again, name="second")
    assert second.code == 0, second.output
    whole = runner.inline(*flags, *PPO, *more, "whole", name="whole").metrics()
    for rows, expected in ((first.metrics(), whole), (second.metrics()[-2:], whole[-2:])):
        for row, wanted in zip(rows, expected, strict=True):
            for name in ("train/grad_norm", "train/critic-grad_norm", "train/critic-value_loss"):
                assert row[name] == pytest.approx(wanted[name], rel=1e-3), name


def test_another_run_starts_with_a_critic(runner, flags) -> None:
    """The weights of both roles by ``--finetune``, or each from its own folder."""
    more = ("--save-interval", 1, "--num-rollout", 2)
    folders = (
        "--save",
        "saved",
        "--save-hf",
        "hf",
        "--critic-save",
        "critics",
        "--save-keep-last",
        1,
    )
    trained = runner.inline(*flags, *PPO, *more, *folders, name="trained")
    assert trained.code == 0, trained.output
    kept = sorted(path.name for path in (runner.tmp / "critics").glob("iter_*"))
    assert kept == ["iter_0000000", "iter_0000001"]
    both = runner.inline(*flags, *PPO, "--load", "saved", "--finetune", name="both")
    each = ("--hf-checkpoint", "hf", "--critic-load", "critics")
    own = runner.inline(*flags, *PPO, *each, name="own")
    assert numbers(own.folder) == numbers(both.folder)
    # of a model that is another than the actor's
    fresh = runner.inline(*flags, *PPO, "--critic-load", "hf", "--num-rollout", 1, name="fresh")
    mine = runner.inline(*flags, *PPO, "--num-rollout", 1, name="mine")
    values = [run.metrics()[0]["rollout/values"] for run in (fresh, mine)]
    assert values[0] != values[1]
