"""Clip-Cov: some of the tokens that lower the entropy most have no gradient.

Source: Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models"
(arXiv 2505.22617), Clip-Cov. The entropy falls with the covariance of log-probs and advantages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algorithms.algorithm import Entries, Row
from slime.algorithms.grpo import Grpo
from slime.algorithms.sequences import Reduce, flatten, keep_where
from slime.config.flag import flag
from slime.config.seeds import derive_seed

from .shared import flags_or_defaults, old_log_probs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class ClipCovFlags:
    _title = "estimator clip_cov"

    clip_cov_share: float = flag(2e-4, low=0, high=1)
    """Share of all tokens that clip_cov leaves out, of those within its bounds"""
    clip_cov_low: float = 1.0
    """Lower bound of the covariance of tokens that clip_cov may leave out"""
    clip_cov_high: float = 5.0
    """Upper bound of the covariance of tokens that clip_cov may leave out"""


def covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor, totals: Tensor) -> Tensor:
    """Return (log π − mean log π)(A − mean A) of each token, ``[R]``; 0 where it is masked.

    Args:
        log_probs, advantages, mask: ``[R]``.
        totals: The sums of log π, of A and of the mask over the trained tokens of the batch, ``[3]``.
    """
    log_prob, advantage = (totals[:2] / totals[2].clamp(min=1)).to(log_probs.dtype)
    return keep_where(mask, (log_probs - log_prob) * (advantages - advantage))


def covariances_of_batch(
    batch: Entries, advantages: Sequence[Tensor], reduce: Reduce
) -> tuple[Tensor, Tensor, float]:
    """Return which tokens are trained, bool ``[R]``, their :func:`covariances` with the means of
    all ranks, ``[R]``, and the number of trained tokens of all ranks.

    Raises:
        ValueError: The batch has no old log-probs.
    """
    import torch

    mask = flatten([torch.as_tensor(one) for one in batch["loss_masks"]])
    log_probs = keep_where(mask, flatten(old_log_probs(batch)))
    values = flatten(advantages)
    weight = mask.double()
    sums = torch.stack([(log_probs * weight).sum(), (values * weight).sum(), weight.sum()])
    totals = reduce.over_data(sums)
    return mask.bool(), covariances(log_probs, values, mask, totals), float(totals[2])


class ClipCov(Grpo):
    """GRPO, where some tokens with a high covariance have no advantage.

    Of N trained tokens, C of which have a covariance within the bounds, each of these is left out with
    the probability share · N / C; the paper draws exactly share · N of them. The draws depend on the
    sample alone, so they are the same on any number of ranks.
    """

    needs_old_log_probs = True
    zero_advantage_has_no_gradient = True
    row = Row(
        "as `grpo`; 0 for a share r of the tokens, drawn among those with (log π_old − mean)·(A − mean) "
        "within bounds",
        "clipped ρ",
        "`--clip-cov-share` r, `--clip-cov-low`, `--clip-cov-high`",
        "arXiv 2505.22617",
    )

    def over_ranks(self, batch: Entries, advantages: list[Tensor], reduce: Reduce) -> list[Tensor]:

        own = flags_or_defaults(self.settings, ClipCovFlags)
        _, covariance, trained = covariances_of_batch(batch, advantages, reduce)
        within = (covariance > own.clip_cov_low) & (covariance < own.clip_cov_high)
        count = reduce.over_data(within.double().sum()).clamp(min=1)
        share = float(own.clip_cov_share * trained / count)
        lengths = [len(one) for one in advantages]
        out = within & (self._draws(batch, lengths) < share)
        return list(flatten(advantages).masked_fill(out, 0.0).split(lengths))

    def _draws(self, batch: Entries, lengths: Sequence[int]) -> Tensor:
        """Return a number from 0 to 1 for each token, which depends on its sample and place."""
        import torch

        indices = batch.get("sample_indices") or range(len(lengths))
        rollout = batch.get("rollout_id") or 0
        draws = []
        for index, length in zip(indices, lengths, strict=True):
            seed = derive_seed(rollout, "clip_cov", int(index))
            draws.append(torch.rand(length, generator=torch.Generator().manual_seed(seed)))
        return flatten(draws)
