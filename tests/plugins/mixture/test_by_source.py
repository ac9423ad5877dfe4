"""An estimator for each data set: each is called with its own samples, and what does not fit is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.algorithms.algorithm import EstimatorSettings
from slime.algorithms.sequences import Identity
from slime.backends.advantages import AdvantageSettings, compute_advantages
from slime.backends.loss import LossSettings, TokenBatch, compute_loss
from slime.config.algorithm import create_algorithm
from slime.config.args import Args
from slime.data.fields import RankBatch
from slime.data.rewards import post_process_rewards
from slime.data.sample import Sample
from slime.plugins.mixture.estimator import check, estimator_of
from tests.make_args import make_args
from tests.plugins.mixture.test_mixture import mixture

CHOSEN: dict[str, Any] = {
    "a": {"name": "gspo", "eps_clip": 0.05},
    "b": "dr_grpo",
    "c": {"name": "kl_cov", "kl_cov_share": 0.3, "kl_cov_coef": 0.5},
}
ALONE = {
    "a": {"advantage_estimator": "gspo", "eps_clip": 0.05, "eps_clip_high": 0.05},
    "b": {"advantage_estimator": "dr_grpo"},
    "c": {"advantage_estimator": "kl_cov", "kl_cov_share": 0.3, "kl_cov_coef": 0.5},
}


def step(args: Args, sources: list[str]) -> tuple[dict[int, Tensor], float, Tensor]:
    """Advantages by sample, loss and gradient of one step on two groups of two of some data sets."""
    samples = [
        Sample(
            index=(ord(name) - 97) * 4 + i,
            group_index=(ord(name) - 97) * 2 + i // 2,
            reward=float(i in (0, 3)) + 0.25 * (name == "a"),
            response_length=2 + i % 2,
            metadata={"source_name": name},
        )
        for name in "abc"
        for i in range(4)
        if name in sources
    ]
    samples.sort(key=lambda one: (one.index or 0) % 4)  # no data set's samples are side by side
    lengths = [sample.response_length for sample in samples]
    generators = [torch.Generator().manual_seed(int(sample.index or 0)) for sample in samples]
    old = [-torch.rand(n, generator=g) * 3 for n, g in zip(lengths, generators, strict=True)]
    moved = [torch.randn(n, generator=g) / 4 for n, g in zip(lengths, generators, strict=True)]
    keys = [sample.group_index for sample in samples]
    batch = RankBatch()
    batch.update(
        {
            "tokens": [torch.zeros(n + 1, dtype=torch.int64) for n in lengths],
            "rewards": post_process_rewards(args, samples, keys)[1],
            "loss_masks": [torch.ones(n, dtype=torch.int32) for n in lengths],
            "rollout_mask_sums": [float(n) for n in lengths],
            "response_lengths": lengths,
            "total_lengths": [n + 1 for n in lengths],
            "group_indices": keys,
            "source_names": [sample.metadata["source_name"] for sample in samples],
            "log_probs": old,
        }
    )
    compute_advantages(AdvantageSettings.from_args(args), batch, Identity())
    advantages = dict(zip([s.index or 0 for s in samples], batch["advantages"], strict=True))
    log_probs = (torch.cat(old) + torch.cat(moved)).requires_grad_()
    tokens = TokenBatch.from_rank_batch(batch, range(len(samples)), log_probs=log_probs)
    loss, _ = compute_loss(LossSettings.from_args(args), tokens, num_rollouts=1, num_tokens=1)
    loss.backward()
    assert log_probs.grad is not None
    parts = dict(zip([s.index or 0 for s in samples], log_probs.grad.split(lengths), strict=True))
    return advantages, loss.item(), torch.cat([parts[i] for i in sorted(parts)])


def test_a_step_is_the_sum_of_those_of_each_data_set_alone() -> None:
    args = make_args(advantage_estimator="by_source", source_estimators=CHOSEN)
    advantages, loss, gradient = step(args, ["a", "b", "c"])
    alone = {name: step(make_args(**flags), [name]) for name, flags in ALONE.items()}
    for found, _, _ in alone.values():
        for index, values in found.items():
            torch.testing.assert_close(advantages[index], values)
    assert loss == pytest.approx(sum(one for _, one, _ in alone.values()), rel=1e-5)
    torch.testing.assert_close(gradient, torch.cat([alone[name][2] for name in "abc"]))


def test_the_file_of_a_mixture_names_estimators(tmp_path: Path) -> None:
    text = (
        "- {name: first, path: FOLDER/a.jsonl, estimator: {name: sapo, sapo_tau_positive: 2}}\n"
        "- {name: second, path: FOLDER/a.jsonl}\n"
    )
    args = mixture(tmp_path, text, advantage_estimator="rloo")
    assert args.advantage_estimator == "by_source"
    assert args.source_estimators == {
        "first": {"name": "sapo", "sapo_tau_positive": 2},
        "second": "rloo",
    }
    assert check(args) == []
    assert create_algorithm(args).notices() == []


def test_the_settings_of_a_data_set_are_its_own() -> None:
    run = EstimatorSettings(eps_clip=0.3, eps_clip_high=0.4)
    assert estimator_of("gspo", run).settings.eps_clip_high == 0.4
    own = estimator_of({"name": "gspo", "eps_clip": "3e-4"}, run).settings
    assert (own.eps_clip, own.eps_clip_high) == (3e-4, 3e-4)


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ("grppo", "'grppo' is none of"),
        (3, "3 is none of"),
        ({"name": "gspo", "sapo_tau_positive": 1}, "gspo has no sapo_tau_positive"),
        ({"name": "dppo", "dppo_delta": 0}, "dppo_delta 0: must be above 0"),
        ({"name": "gspo", "eps_clip": "small"}, "eps_clip 'small' is no float"),
        ("ppo", "for a whole run"),
        ("rae", "for a whole run"),
        ("otb", "for a whole run"),
        ("dppo", "needs --use-rollout-logprobs"),
    ],
)
def test_what_does_not_fit_is_told(choice: Any, problem: str) -> None:
    args = make_args().with_values(source_estimators={"gsm8k": choice})
    (line,) = check(args)
    assert "data set gsm8k" in line and problem in line


def test_a_sample_of_an_unknown_data_set_is_told() -> None:
    args = make_args(advantage_estimator="by_source", source_estimators={"a": "grpo"})
    with pytest.raises(ValueError, match="no estimator of the data set 'b'"):
        step(args, ["a", "b"])
