"""GRPO: the advantage of every token is the reward minus the mean of its group, divided by the
standard deviation; RLOO, with another baseline; GSPO and CISPO, with another importance ratio.

Sources: Shao et al., "DeepSeekMath" (2024), outcome supervision. RLOO: Ahmadian et al., "Back to
Basics: Revisiting REINFORCE Style Optimization" (2024), eq. 8.

GSPO has one ratio per sequence, which is its length-normalized likelihood ratio; loss and clip are
those of PPO. Source: Zheng et al., "Group Sequence Policy Optimization" (2025), eq. 7.

CISPO clips the importance weight instead of the update, so that no token loses its gradient.
Source: MiniMax, "MiniMax-M1" (2025), eq. 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .algorithm import Algorithm, Entries, Row
from .baselines import centred, standardized
from .sequences import IDENTITY, Reduce, exp_ratio, flatten, keep_where, sequence_means, spread

if TYPE_CHECKING:
    from torch import Tensor


def get_grpo_returns(rewards: Sequence[float] | Tensor, kl: Sequence[Tensor]) -> list[Tensor]:
    """Return R_i for every token of sample i, as tensors with the shapes of ``kl``."""
    return [k.new_full(k.shape, float(reward)) for reward, k in zip(rewards, kl, strict=True)]


class Grpo(Algorithm):
    """GRPO. ``--kl-coef`` has no effect on it, nor on estimators that inherit its advantages."""

    row = Row(
        "(r − mean) / (std + 1e-6) of the group, std over n − 1",
        "clipped ρ of the token",
        "`--disable-grpo-std-normalization` omits the division by the std",
        "Shao et al. 2024, DeepSeekMath",
    )

    def group_baseline(self, rewards: Sequence[float]) -> Sequence[float]:
        return standardized(rewards) if self.settings.std_normalization else centred(rewards)

    def advantages(self, batch: Entries) -> tuple[list[Tensor], list[Tensor]]:
        """Return advantages and returns, which are equal."""
        returns = get_grpo_returns(batch["rewards"], batch["kl"])
        return returns, [x.clone() for x in returns]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Return r_i − Σ_{j≠i} r_j / (n − 1) = n / (n − 1) · (r_i − mean), or 0 for a group of one."""
    n = len(rewards)
    return [d * n / (n - 1) for d in centred(rewards)] if n > 1 else [0.0] * n


class Rloo(Grpo):
    """GRPO with the leave-one-out baseline."""

    row = Row("r − mean of the other samples of the group", "clipped ρ", "", "Ahmadian et al. 2024")

    def group_baseline(self, rewards: Sequence[float]) -> Sequence[float]:
        return leave_one_out(rewards)


def sequence_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    reduce: Reduce = IDENTITY,
) -> Tensor:
    """Return for each token ``[R]`` the masked mean of log π_old − log π_θ over its whole
    sequence.
    """
    difference = keep_where(mask, old_log_probs - log_probs)
    return spread(sequence_means(difference, mask, lengths, reduce), lengths)


def compute_gspo_kl(
    full_log_probs: Sequence[Tensor],
    full_old_log_probs: Sequence[Tensor],
    local_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> Tensor:
    """Compute :func:`sequence_kl` from lists with one tensor per sample.

    Args:
        full_log_probs, full_old_log_probs, loss_masks: Tensors over whole responses.
        local_log_probs: The part of each response on this rank, of which only the length is used.

    Returns:
        The result for the local tokens, flat ``[sum of local lengths]``.
    """
    lengths = [len(x) for x in full_log_probs]
    mask = flatten(loss_masks)
    difference = keep_where(mask, flatten(full_old_log_probs) - flatten(full_log_probs))
    return spread(sequence_means(difference, mask, lengths), [len(x) for x in local_log_probs])


_LARGEST_CLIP = 0.05  # a hundred times that of the paper; clips of ratios per token are larger


class Gspo(Grpo):
    """GRPO with one ratio per response."""

    # The reference implementation recomputes π_old for GSPO even if a rollout has one step.
    # Otherwise the metrics ppo_kl and pg_clipfrac, whose values are close to the small clips, could
    # not be compared with it.
    needs_old_log_probs = True
    row = Row(
        "as `grpo`",
        "clipped ρ of the sequence: exp(mean of log π − log π_old)",
        "small clips: `--eps-clip 3e-4 --eps-clip-high 4e-4`",
        "Zheng et al. 2025",
    )

    def notices(self) -> list[str]:
        low = self.settings.eps_clip
        high = self.settings.eps_clip_high
        if max(low, high) < _LARGEST_CLIP:
            return []
        return [
            f"gspo clips the ratio of a whole sequence at --eps-clip {low} and --eps-clip-high "
            f"{high}, which hardly any sequence reaches; the paper has --eps-clip 3e-4 "
            "--eps-clip-high 4e-4"
        ]

    def ppo_kl(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        mask: Tensor,
        lengths: Sequence[int],
        reduce: Reduce,
    ) -> Tensor:
        return sequence_kl(log_probs, old_log_probs, mask, lengths, reduce)


def compute_cispo_loss(
    ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """Compute L = −sg(clip(ρ, 1−eps_clip, 1+eps_clip_high)) A log π_θ per token.

    Here ρ = exp(−ppo_kl), and sg is the stop gradient.

    Returns:
        The loss and clipfrac (1 where the clip changed ρ), both with the shape of ``log_probs``.
    """
    # The ratio is a weight without a gradient; the gradient comes only from the log-prob. So a
    # clipped token has a smaller gradient, but never none, unlike in the clipped surrogate of PPO.
    ratio = exp_ratio(-ppo_kl.detach())
    clipped = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -clipped * advantages * log_probs, (clipped != ratio).to(log_probs.dtype)


class Cispo(Grpo):
    """GRPO's advantages; the clip bounds the weight of a token's gradient, and never removes the
    gradient.
    """

    zero_advantage_has_no_gradient = True  # the loss is a product with the advantage
    row = Row(
        "as `grpo`",
        "−clip(ρ)·A·log π, no gradient through ρ",
        "`--eps-clip 1` for no lower clip",
        "MiniMax 2025, MiniMax-M1",
    )

    def policy_loss(
        self, ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        clip = self.settings
        loss, clipfrac = compute_cispo_loss(
            ppo_kl, log_probs, advantages, clip.eps_clip, clip.eps_clip_high
        )
        # Tokens with A = 0 count as not clipped. A step may skip samples whose advantages are all
        # 0, and the metric must not depend on that.
        return loss, clipfrac * (advantages != 0)

    def notices(self) -> list[str]:
        low = self.settings.eps_clip
        if low >= 1:
            return []
        return [
            f"cispo has a lower clip of the weight at {1 - low:g} (--eps-clip {low}); the paper "
            "has none (--eps-clip 1)"
        ]
