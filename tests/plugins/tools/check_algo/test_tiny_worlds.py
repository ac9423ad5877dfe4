"""What ``slime check-algo`` takes for true, against formulas that share no code with it."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from slime.plugins.tools.check_algo.lab import Lab, make_args, moments, reference
from slime.plugins.tools.check_algo.world import (
    LENGTHS,
    ONE_LENGTH,
    ONE_TOKEN,
    World,
    draws,
    groups_of,
)

WORLDS = pytest.mark.parametrize("world", [ONE_LENGTH, LENGTHS, ONE_TOKEN])


def expected_reward(world: World, table: np.ndarray) -> float:
    total = 0.0
    for prompt, rewards in enumerate(world.rewards):
        for response, reward in zip(world.responses, rewards, strict=True):
            chance = 1.0
            for t, action in enumerate(response):
                logits = table[world.states[(prompt, *response[:t])]]
                chance *= math.exp(logits[action]) / sum(math.exp(x) for x in logits)
            total += chance * reward
    return total / len(world.rewards)


@WORLDS
def test_the_true_gradient_is_that_of_finite_differences(world: World) -> None:
    table = world.table(0.3, 0.9)
    found = world.true_gradient(table)
    for place in itertools.product(*map(range, table.shape)):
        step = torch.zeros_like(table)
        step[place] = 1e-5
        high, low = (expected_reward(world, (table + s * step).numpy()) for s in (1, -1))
        assert float(found[place]) == pytest.approx((high - low) / 2e-5, abs=1e-9)


@WORLDS
def test_responses_are_all_that_a_policy_can_answer(world: World) -> None:
    assert world.probabilities(world.table(2.0, 3.0)).sum(1).tolist() == pytest.approx([1.0, 1.0])


def test_a_critic_knows_the_mean_reward_from_each_state_on() -> None:
    table = torch.zeros(len(ONE_LENGTH.states), 2, dtype=torch.float64)
    values = ONE_LENGTH.values(table)
    known = {state: float(values[row]) for state, row in ONE_LENGTH.states.items()}
    # Rewards of prompt 0: 1 and 0 after action 0, 1/2 and 0 after action 1.
    assert known == {(0,): 0.375, (0, 0): 0.5, (0, 1): 0.25, (1,): 0.25, (1, 0): 0.0, (1, 1): 0.5}


def test_groups_have_the_probabilities_of_their_orders() -> None:
    chances = [0.2, 0.3, 0.5]
    by_hand: Counter[tuple[int, ...]] = Counter()
    for group in itertools.product(range(3), repeat=3):
        by_hand[tuple(sorted(group))] += math.prod(chances[i] for i in group)
    assert dict(groups_of(chances, 3)) == pytest.approx(dict(by_hand))


def test_batches_are_enumerated_or_drawn() -> None:
    table = ONE_LENGTH.table(0.7, 0.8)
    exact, drawn = draws(ONE_LENGTH, table, 2), draws(ONE_LENGTH, table, 2, limit=50)
    assert (exact.exact, len(exact.batches), drawn.exact, len(drawn.batches)) == (
        True,
        100,
        False,
        50,
    )
    assert exact.weights.sum() == pytest.approx(1.0)
    assert drawn.weights.sum() == pytest.approx(1.0)


def test_rloo_through_slime_has_the_moments_of_its_formula() -> None:
    lab = Lab(make_args("rloo", ["--eps-clip", "1000"]), LENGTHS, 2)
    older = lab.older(4.0)
    batches = draws(LENGTHS, older, 2)
    found, wanted = moments(lab, older, batches), reference(lab, older, batches, True)
    assert found.mean.tolist() == pytest.approx(wanted.mean.tolist(), abs=1e-7)
    assert found.variance == pytest.approx(wanted.variance, rel=1e-5)
    assert found.error == 0.0


def test_a_drawn_mean_has_an_error() -> None:
    lab = Lab(make_args("rloo"), ONE_LENGTH, 2)
    few = draws(ONE_LENGTH, lab.table, 2, limit=60)
    exact = reference(lab, lab.table, draws(ONE_LENGTH, lab.table, 2), True)
    drawn = reference(lab, lab.table, few, True)
    assert 0 < float(np.linalg.norm(drawn.mean - exact.mean)) < 3 * drawn.error
