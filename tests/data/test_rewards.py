"""Reward post-processing: groups by group_index, whatever their sizes and wherever their samples
stand.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.algorithms import Algorithm
from slime.algorithms.grpo import Grpo
from slime.data.rewards import post_process_rewards, shares_in_rollouts
from slime.data.sample import Sample
from tests.every_algorithm import ALGORITHMS
from tests.make_args import make_args


def post_process(
    args: dict[str, Any], rewards: list[Any], groups: list[int]
) -> tuple[list[float], list[float]]:
    samples = [
        Sample(
            index=i,
            group_index=g,
            reward=None if r == "timeout" else r,
            reward_timed_out=r == "timeout",
        )
        for i, (r, g) in enumerate(zip(rewards, groups, strict=True))
    ]
    return post_process_rewards(make_args(**args), samples, groups)


def by_formula(rewards: list[float], std: bool, estimator: str = "grpo") -> np.ndarray:
    values = np.asarray(rewards)
    centred = values - values.mean()
    if estimator == "rloo":
        return centred * len(values) / max(len(values) - 1, 1)
    if estimator == "maxrl":
        return centred / values.mean() if values.mean() > 1e-6 else np.zeros(len(values))
    std = std and ALGORITHMS[estimator].group_baseline is Grpo.group_baseline and len(values) > 1
    return centred / (values.std(ddof=1) + 1e-6) if std else centred


def test_the_documented_example() -> None:
    _, rewards = post_process(
        {"advantage_estimator": "grpo"}, [1, 0, 1, 1, 0, 0], [0, 0, 1, 1, 2, 2]
    )
    root = math.sqrt(0.5)
    assert rewards == pytest.approx([root, -root, 0, 0, 0, 0], abs=2e-6)
    assert rewards[2:] == [0.0] * 4


# Those that see a whole batch have their numbers in tests/plugins/estimators.
BY_GROUP = sorted(
    name for name, kind in ALGORITHMS.items() if kind.batch_baseline is Algorithm.batch_baseline
)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.5, 1.0, -1.0])),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from(BY_GROUP),
    st.booleans(),
    st.booleans(),
)
def test_every_group_by_its_own_formula(
    members: list[tuple[int, float]], estimator: str, std: bool, normalize: bool
) -> None:
    groups, values = [g for g, _ in members], [r for _, r in members]  # uneven and interleaved
    args = {
        "advantage_estimator": estimator,
        "grpo_std_normalization": std,
        "rewards_normalization": normalize,
    }
    raw, rewards = post_process(args, values, groups)
    assert raw == values
    for group in set(groups):
        inside = [i for i, g in enumerate(groups) if g == group]
        own = [values[i] for i in inside]
        if not normalize or estimator in ("ppo", "rae", "reinforce_plus_plus"):
            expected = np.asarray(own)
        else:
            expected = by_formula(own, std, estimator)
        assert [rewards[i] for i in inside] == pytest.approx(expected, abs=1e-9)
        if normalize and ALGORITHMS[estimator].needs_group and len(set(own)) == 1:
            assert all(rewards[i] == 0.0 for i in inside), (
                "exactly zero, so that the group can be skipped"
            )


def test_the_penalty_of_long_responses_comes_before_the_baseline_and_leaves_the_raw_reward() -> (
    None
):
    samples = [Sample(index=i, reward=1.0, response_length=n) for i, n in enumerate((5, 9, 10))]
    args = make_args(
        advantage_estimator="dr_grpo",
        rollout_max_response_len=10,
        overlong_buffer_len=2,
        overlong_penalty=1.0,
    )
    raw, rewards = post_process_rewards(args, samples, [0, 0, 0])
    assert raw == [1.0, 1.0, 1.0]
    assert rewards == pytest.approx([0.5, 0.0, -0.5])  # shaped: 1, 0.5, 0; their mean is 0.5
    args.rewards_normalization = False
    assert post_process_rewards(args, samples, [0, 0, 0]) == ([1.0, 1.0, 1.0], [1.0, 0.5, 0.0])


@pytest.mark.parametrize(
    ("estimator", "won", "lost"),
    [
        ("rloo", 1.0, -1.0),
        ("grpo", 0.5**0.5, -(0.5**0.5)),
        ("dr_grpo", 0.5, -0.5),
        ("ppo", 1.0, 0.0),
    ],
)
def test_a_baseline_compares_rollouts_whatever_the_number_of_their_samples(
    estimator: str, won: float, lost: float
) -> None:
    """An agent's session has a sample for each leaf of its tree, and all of them have its
    reward.
    """
    leaves = [Sample(index=i, group_index=0, rollout_id=7, reward=1.0) for i in range(3)]
    samples = [*leaves, Sample(index=3, group_index=0, reward=0.0)]
    _, rewards = post_process_rewards(make_args(advantage_estimator=estimator), samples, [0] * 4)
    assert rewards == pytest.approx([won] * 3 + [lost], abs=2e-6)
    _, rewards = post_process_rewards(
        make_args(advantage_estimator=estimator), samples[::-1], [0] * 4, [1, 2, 2, 2]
    )
    assert rewards == pytest.approx([lost] + [won] * 3, abs=2e-6)


def test_leaves_with_a_penalty_of_their_own_are_compared_with_the_other_rollouts() -> None:
    lengths = (5, 10, 5)  # the second leaf of the first rollout is penalized by 1
    samples = [Sample(index=i, reward=1.0, response_length=n) for i, n in enumerate(lengths)]
    flags = dict(rollout_max_response_len=10, overlong_buffer_len=2, overlong_penalty=1.0)
    args = make_args(advantage_estimator="rloo", **flags)
    _, rewards = post_process_rewards(args, samples, [0, 0, 0], ["a", "a", "b"])
    assert rewards == pytest.approx([0.0, -1.0, 0.5])  # 1 - 1, 0 - 1, 1 - (1 + 0) / 2


def test_a_leaf_whose_verifier_failed_is_not_counted_in_its_rollout() -> None:
    samples = [Sample(reward=1.0), Sample(reward_timed_out=True), Sample(reward=0.0)]
    _, rewards = post_process_rewards(
        make_args(advantage_estimator="rloo"), samples, [0, 0, 0], [0, 0, 1]
    )
    assert rewards == [1.0, 0.0, -1.0]
    assert shares_in_rollouts([0, 0, 1], [1.0, math.nan, 0.0]) == [1.0, 0.0, 1.0]


def test_a_single_sample_has_no_deviation() -> None:
    assert post_process({"advantage_estimator": "grpo"}, [3.0], [0])[1] == [0.0]


@pytest.mark.parametrize("estimator", ["grpo", "ppo"])
def test_a_timed_out_verifier_is_no_zero(estimator: str) -> None:
    raw, rewards = post_process(
        {"advantage_estimator": estimator}, [1.0, "timeout", 1.0, 0.0], [0, 0, 0, 0]
    )
    assert math.isnan(raw[1]) and rewards[1] == 0.0
    assert [raw[i] for i in (0, 2, 3)] == [1.0, 1.0, 0.0]
    if estimator == "grpo":
        assert [rewards[i] for i in (0, 2, 3)] == pytest.approx(by_formula([1, 1, 0], True))


def test_removed_samples_stay_in_the_statistics() -> None:
    samples = [Sample(index=i, reward=float(r)) for i, r in enumerate([1, 0, 0])]
    samples[0].remove_sample = True
    _, rewards = post_process_rewards(make_args(), samples, [0, 0, 0])
    assert rewards == pytest.approx(by_formula([1, 0, 0], True))


def test_dict_rewards_need_a_key() -> None:
    with pytest.raises(ValueError, match="--reward-key"):
        post_process({}, [{"score": 1.0}], [0])
    args = {"reward_key": "score", "advantage_estimator": "ppo"}
    assert post_process(args, [{"score": -1.0}], [0])[1] == [-1.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (None, "sample 0"),
        (math.inf, "is inf"),
        ((0.5, "right"), r"sample 0 is \(0.5, 'right'\), a tuple"),
        ("good", "sample 0 is 'good', a str"),
    ],
)
def test_unusable_rewards(reward: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        post_process({}, [reward], [0])


def half(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    return [s.reward for s in samples], [s.reward / 2 for s in samples]  # type: ignore[misc,operator]


def too_few(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    return [1.0], [1.0]


def test_custom_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    args = {"custom_reward_post_process_path": f"{__file__}:half"}
    assert post_process(args, [1.0, 3.0], [0, 0]) == ([1.0, 3.0], [0.5, 1.5])
    with pytest.raises(ValueError, match="1 and 1 for 2 samples"):
        post_process({"custom_reward_post_process_path": f"{__file__}:too_few"}, [1.0, 3.0], [0, 0])


def test_an_unknown_estimator_does_not_train_on_raw_rewards() -> None:
    with pytest.raises(ValueError, match="--advantage-estimator 'maxlr'"):
        post_process({"advantage_estimator": "maxlr"}, [1.0, 0.0], [0, 0])
