"""Estimators with one error each, as they occur in real code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from slime.algorithms.algorithm import Entries
from slime.algorithms.grpo import Rloo
from slime.algorithms.sequences import Reduce, Reducer, exp_ratio, flatten
from slime.config.args import Args

Advantages = tuple[list[Tensor], list[Tensor]]


class MeanOverLeaves(Rloo):
    """Each leaf of an agent's tree has the weight of a whole rollout."""

    def advantages(self, batch: Entries) -> Advantages:
        found, returns = super().advantages(batch)
        whole = batch["rollout_mask_sums"]
        own = [float(mask.sum()) for mask in batch["loss_masks"]]
        return [a * w / max(n, 1) for a, w, n in zip(found, whole, own, strict=True)], returns


class K1InTheLoss(Rloo):
    """The KL is added to the loss as k1, whose gradient does not lower it."""

    def policy_loss(
        self, ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        loss, clipfrac = super().policy_loss(ppo_kl, log_probs, advantages)
        return loss - 0.1 * ppo_kl, clipfrac


class StdOfTheBatch(Rloo):
    """Advantages are divided by the deviation of the batch instead of the group's."""

    def advantages(self, batch: Entries) -> Advantages:
        found, returns = super().advantages(batch)
        std = torch.tensor(batch["rewards"]).std() + 1e-6
        return [a / std for a in found], returns


class DropsTruncated(Rloo):
    """Samples that were cut off get no advantage."""

    def advantages(self, batch: Entries) -> Advantages:
        found, returns = super().advantages(batch)
        return [a * (1 - cut) for a, cut in zip(found, batch["truncated"], strict=True)], returns


class WrongWeights(Rloo):
    """The ratio is that of the current weights to themselves, whatever sampled the tokens."""

    def ppo_kl(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        mask: Tensor,
        lengths: Sequence[int],
        reduce: Reduce,
    ) -> Tensor:
        return log_probs.detach() - log_probs


class DividesByLengthTwice(Rloo):
    """The advantage is divided by the length, as the mean over tokens is already."""

    def advantages(self, batch: Entries) -> Advantages:
        found, returns = super().advantages(batch)
        return [a / len(a) for a in found], returns


class ShiftedByOne(Rloo):
    """The old log-probs are those of the token before."""

    def ppo_kl(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        mask: Tensor,
        lengths: Sequence[int],
        reduce: Reduce,
    ) -> Tensor:
        return old_log_probs.roll(1) - log_probs


class BaselineOfTheBatch(Rloo):
    """The baseline is the mean over all prompts."""

    def group_baseline(self, rewards: Sequence[float]) -> Sequence[float]:
        return rewards

    def advantages(self, batch: Entries) -> Advantages:
        found, returns = super().advantages(batch)
        mean = torch.tensor(batch["rewards"]).mean()
        return [a - mean for a in found], returns


class IgnoresTheMask(Rloo):
    """The mean over tokens counts those of a tool as well."""

    def advantages(self, batch: Entries) -> Advantages:
        found, returns = super().advantages(batch)
        masks = batch["loss_masks"]
        return [a * mask.float().mean() for a, mask in zip(found, masks, strict=True)], returns


class ClipsTheWrongSide(Rloo):
    """The minimum of the two losses where the maximum is meant."""

    def policy_loss(
        self, ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        ratio = exp_ratio(-ppo_kl)
        clipped = ratio.clamp(1 - self.settings.eps_clip, 1 + self.settings.eps_clip_high)
        return torch.minimum(-ratio * advantages, -clipped * advantages), ratio * 0


class MeanOfMicroBatches(Rloo):
    """The loss is divided by the samples of the micro-batch, and then by those of the step."""

    def pg_reducer(self, mask: Tensor, default: Reducer) -> Reducer:
        return lambda x: (x * mask).sum() / mask.sum().clamp(min=1)


class NotBroadcast(Rloo):
    """Only the last token gets the advantage."""

    def advantages(self, batch: Entries) -> Advantages:
        found, returns = super().advantages(batch)
        return [torch.cat([a[:-1] * 0, a[-1:]]) for a in found], returns


class MeanOfTheRank(Rloo):
    """The sum over samples is divided by the rollouts that this rank happens to have."""

    def advantages(self, batch: Entries) -> Advantages:
        found, returns = super().advantages(batch)
        return [a / len(set(batch["rollout_ids"])) for a in found], returns


class SkipsWhatHasAGradient(K1InTheLoss):
    """The class says that samples without an advantage may be skipped."""

    zero_advantage_has_no_gradient = True


PLANTED: dict[type[Rloo], str] = {
    MeanOverLeaves: "leaves",
    K1InTheLoss: "regulariser",
    StdOfTheBatch: "spread of other groups",
    DropsTruncated: "truncated samples",
    WrongWeights: "ratio",
    DividesByLengthTwice: "length",
    ShiftedByOne: "alignment",
    BaselineOfTheBatch: "level of other groups",
    IgnoresTheMask: "masked tokens",
    ClipsTheWrongSide: "clip",
    MeanOfMicroBatches: "micro batches",
    NotBroadcast: "tokens",
    MeanOfTheRank: "ranks",
    SkipsWhatHasAGradient: "skipping",
}
"""Each class with the check that must be the first to fail."""


class ByDesign(StdOfTheBatch):
    """The same as a choice of its author, which the class declares."""

    by_design: ClassVar[dict[str, str]] = {
        name: "one scale for the batch (a note)"
        for name in ("spread of other groups", "leaves", "ranks", "direction")
    }


class Raises(Rloo):
    """An estimator whose advantages are of no use."""

    def advantages(self, batch: Entries) -> Advantages:
        raise RuntimeError("no advantages today")


def reinforce(
    args: Args, batch: dict[str, Any], logits: Tensor, mean: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss for ``--loss-type custom_loss``, from logits."""
    chosen = logits.log_softmax(-1).gather(-1, batch["targets"][:, None]).squeeze(-1)
    return -mean(flatten(batch["advantages"]) * chosen), {}


def reinforce_without_mean(
    args: Args, batch: dict[str, Any], logits: Tensor, mean: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same, averaged over the micro-batch."""
    loss, metrics = reinforce(args, batch, logits, mean)
    return loss / len(batch["advantages"]), metrics
