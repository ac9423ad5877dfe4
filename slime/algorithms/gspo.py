"""GSPO: one importance ratio per sequence, its length-normalised likelihood ratio.

Source: Zheng et al., "Group Sequence Policy Optimization" (2025), eq. 7. Loss and clip are PPO's.
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
    """Masked mean of log π_old − log π_θ over each whole sequence, given to each of its tokens, ``[R]``."""
    difference = keep_where(mask, old_log_probs - log_probs)
    return spread(sequence_means(difference, mask, lengths, reduce), lengths)


def compute_gspo_kl(
    full_log_probs: Sequence[Tensor],
    full_old_log_probs: Sequence[Tensor],
    local_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> Tensor:
    """:func:`sequence_kl` on lists, one tensor per sample.

    Args:
        full_log_probs, full_old_log_probs, loss_masks: over the whole responses.
        local_log_probs: this rank's share of each response; only the lengths are used.

    Returns:
        flat ``[sum of local lengths]``.
    """
    lengths = [len(x) for x in full_log_probs]
    mask = flatten(loss_masks)
    difference = keep_where(mask, flatten(full_old_log_probs) - flatten(full_log_probs))
    return spread(sequence_means(difference, mask, lengths), [len(x) for x in local_log_probs])


class Gspo(Grpo):
    """GRPO with one ratio per response."""

    # As in the reference implementation, which recomputes π_old for GSPO even where a rollout has one step: only so are
    # its metrics ppo_kl and pg_clipfrac comparable, whose values lie near the small clips.
    needs_old_log_probs = True
    row = Row(
        "as `grpo`",
        "clipped ρ of the sequence: exp(mean of log π − log π_old)",
        "small clips: `--eps-clip 3e-4 --eps-clip-high 4e-4`",
        "Zheng et al. 2025",
    )

    def ppo_kl(
        self, log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, lengths: Sequence[int], reduce: Reduce
    ) -> Tensor:
        return sequence_kl(log_probs, old_log_probs, mask, lengths, reduce)
