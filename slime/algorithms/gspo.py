"""GSPO: one importance ratio per sequence, which is its length-normalized likelihood ratio.

Source: Zheng et al., "Group Sequence Policy Optimization" (2025), eq. 7. Loss and clip are those of PPO.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .algorithm import Row
from .grpo import Grpo
from .reduce import Reduce
from .sequences import IDENTITY, flatten, keep_where, sequence_means, spread

if TYPE_CHECKING:
    from torch import Tensor


def sequence_kl(
    log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, lengths: Sequence[int], reduce: Reduce = IDENTITY
) -> Tensor:
    """Return for each token ``[R]`` the masked mean of log π_old − log π_θ over its whole sequence."""
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

    # The reference implementation recomputes π_old for GSPO even if a rollout has one step. Otherwise the metrics
    # ppo_kl and pg_clipfrac, whose values are close to the small clips, could not be compared with it.
    needs_old_log_probs = True
    row = Row(
        "as `grpo`",
        "clipped ρ of the sequence: exp(mean of log π − log π_old)",
        "small clips: `--eps-clip 3e-4 --eps-clip-high 4e-4`",
        "Zheng et al. 2025",
    )

    def notices(self) -> list[str]:
        low, high = self.settings.eps_clip, self.settings.eps_clip_high
        if max(low, high) < _LARGEST_CLIP:
            return []
        return [
            f"gspo clips the ratio of a whole sequence at --eps-clip {low} and --eps-clip-high {high}, which hardly "
            "any sequence reaches; the paper has --eps-clip 3e-4 --eps-clip-high 4e-4"
        ]

    def ppo_kl(
        self, log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, lengths: Sequence[int], reduce: Reduce
    ) -> Tensor:
        return sequence_kl(log_probs, old_log_probs, mask, lengths, reduce)
