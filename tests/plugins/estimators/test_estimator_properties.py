"""What holds for all rewards and log-probs: zero, order, agreement with the example."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config.algorithm import create_algorithm
from slime.plugins.estimators.maxrl import relative_to_mean
from tests.make_args import make_args

quick = settings(deadline=None, max_examples=60)


@quick
@given(st.lists(st.integers(0, 8).map(lambda k: k / 8), min_size=1, max_size=12))
def test_maxrl_sums_to_zero_and_does_not_depend_on_the_order(rewards: list[float]) -> None:
    result = relative_to_mean(rewards)
    assert sum(result) == pytest.approx(0, abs=1e-9)
    assert relative_to_mean(rewards[::-1]) == result[::-1]
    if len(set(rewards)) == 1:
        assert set(result) == {0.0}


def test_maxrl_takes_a_mean_that_is_only_rounding_for_none() -> None:
    assert sum([0.1] * 3, -0.3) != 0
    assert relative_to_mean([0.1] * 10 + [-1.0]) == [0.0] * 11


def test_the_example_of_maxrl_computes_the_same() -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "maxrl" / "maxrl.py"
    own, built_in = (create_algorithm(make_args(advantage_estimator=x)) for x in (f"{example}:MaxRL", "maxrl"))
    for rewards in ([1.0, 0.0, 0.0, 0.0], [0.0, 0.0], [0.5, 1.5], [-1.0, 0.5]):
        assert own.group_baseline(rewards) == pytest.approx(built_in.group_baseline(rewards))
