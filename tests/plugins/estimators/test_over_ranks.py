"""Estimators that look at more than one sample: the same on any number of ranks, and baselines that
are remembered from rollout to rollout.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.algorithms.sequences import IDENTITY, Reduce
from slime.backends.advantages import AdvantageSettings, compute_advantages
from slime.config.args import Args
from slime.data.sample import Sample, flatten
from slime.data.source import RolloutDataSourceWithBuffer
from slime.models.token_log_probs import token_log_probs
from slime.plugins.estimators.kl_cov import kth_largest
from slime.plugins.estimators.rae import BASELINE, check, remember
from slime.plugins.tools.check_algo.world import Exchange, ThreadReduce
from tests.make_args import make_args


def on_ranks(count: int, call: Callable[[int, Reduce], Any]) -> list[Any]:
    """The results of ``count`` ranks, which are threads."""
    exchange = Exchange(count)
    reduces = [
        ThreadReduce(count, torch.device("cpu"), rank=rank, exchange=exchange)
        for rank in range(count)
    ]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count), reduces))


def rank_batch(places: list[int]) -> dict[str, Any]:
    """The samples at some places of one rollout of 12 samples in four groups."""
    generators = [torch.Generator().manual_seed(place) for place in places]
    lengths = [3 + place % 4 for place in places]
    drawn = [torch.rand(2, n, generator=g) for n, g in zip(lengths, generators, strict=True)]
    return {
        "partition": places,
        "rewards": [float(place % 3) - 1.0 for place in places],
        "group_indices": [place // 3 + 5 for place in places],
        "response_lengths": lengths,
        "loss_masks": [torch.ones(n, dtype=torch.int32) for n in lengths],
        "log_probs": [-3 * one[0] for one in drawn],
        "squared_probs": [one[1] for one in drawn],
    }


@pytest.mark.parametrize("name", ["otb", "kl_cov", "clip_cov"])
def test_ranks_compute_what_one_rank_does(name: str) -> None:
    flags = {"kl_cov_share": 0.2, "clip_cov_share": 0.3, "clip_cov_low": 0.1}
    settings = AdvantageSettings.from_args(make_args(advantage_estimator=name).with_values(**flags))

    def advantages(places: list[int], reduce: Reduce) -> dict[int, Tensor]:
        batch = rank_batch(places)
        compute_advantages(settings, batch, reduce)  # type: ignore[arg-type]
        parts = zip(batch["advantages"], batch["returns"], strict=True)
        return dict(zip(places, (torch.stack(part) for part in parts), strict=True))

    # Groups are divided, and one rank has fewer samples.
    shares = [[7, 0, 4, 11, 2], [9, 1, 3, 10, 6, 5, 8]]
    divided = on_ranks(2, lambda rank, reduce: advantages(shares[rank], reduce))
    whole = advantages(list(range(12)), IDENTITY)
    for place, values in (divided[0] | divided[1]).items():
        torch.testing.assert_close(values, whole[place])
    if name == "kl_cov":
        count = sum(len(one[0]) for one in whole.values())
        assert sum(int(one[1].sum()) for one in whole.values()) == int(0.2 * count)


@pytest.mark.parametrize("k", [1, 4, 9])
def test_the_kth_largest_of_all_ranks(k: int) -> None:
    values = torch.tensor([0.0, -0.0, 1e-30, -2.5, 3.0, -1e30, 7.25, 3.0, float("-inf"), 0.1])
    found = on_ranks(2, lambda rank, reduce: kth_largest(values[rank::2], k, reduce))
    assert {float(one) for one in found} == {float(values.sort(descending=True).values[k - 1])}


def test_a_pass_at_half_the_temperature_gives_the_sum_of_squares() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 8, generator=generator) for n in (5, 11))
    targets = torch.tensor([1, 0, 10, 4, 4])
    p, q = (token_log_probs(hidden, weight, targets, t).log_probs for t in (0.8, 0.4))
    expected = (hidden @ weight.T / 0.8).softmax(-1).square().sum(-1)
    torch.testing.assert_close((2 * p - q).exp(), expected)


def game(number: int, rewards: tuple[float, float]) -> list[Sample | list[Sample]]:
    """A game of two players, into which one rollout fanned out."""
    return [
        [
            Sample(group_index=number, reward=reward, metadata={"role": role})
            for role, reward in zip(("black", "white"), rewards, strict=True)
        ]
    ]


def source_of(args: Args) -> RolloutDataSourceWithBuffer:
    return RolloutDataSourceWithBuffer(args.with_values(rollout_global_dataset=False))


def test_rae_remembers_the_mean_reward_of_each_role() -> None:
    args = make_args(advantage_estimator="rae").with_values(rae_decay=0.5)
    source = source_of(args)
    first, second = game(0, (1.0, -1.0)), game(1, (0.0, 1.0))
    remember(args, source, "filtered", game(9, (5.0, 5.0)))
    remember(args, source, "accepted", first)
    again = source_of(args)
    again.load_state_dict(pickle.loads(pickle.dumps(source.state_dict())))
    for one in (source, again):
        remember(args, one, "accepted", second)
        noted = [(s.train_metadata or {})[BASELINE] for g in (first, second) for s in flatten(g)]
        assert noted == [0.5, -0.5, 0.25, 0.25]
    late = game(2, (1.0, 1.0))
    flatten(late)[0].reward_timed_out = True
    remember(args, source, "accepted", late)
    assert [(s.train_metadata or {})[BASELINE] for s in flatten(late)] == [0.25, 0.625]


def test_rae_says_where_it_cannot_remember(tmp_path: Path) -> None:
    args = make_args(advantage_estimator="rae")
    assert check(args) == []
    (problem,) = check(args.with_values(rollout_function_path="mine.generate_rollout"))
    assert "--rollout-function-path" in problem

    class Own:
        def __len__(self) -> int:
            return 0

        def get_samples(self, num_samples: int) -> list[Any]:
            return []

        def add_samples(self, samples: list[Any]) -> None: ...

    with pytest.raises(TypeError, match="Own, does not derive from RolloutDataSource"):
        remember(args, Own(), "accepted", game(0, (1.0, 0.0)))
