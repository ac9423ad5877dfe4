"""What the estimators of this plug-in share: how they get their flags, and choices by the sign of
the advantage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from slime.algorithms.algorithm import Entries, EstimatorSettings
from slime.algorithms.grpo import Grpo

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class EngineTrustRegion(Grpo):
    """GRPO's advantages with a loss in a trust region around the engine's policy."""

    requires: ClassVar[Mapping[str, str]] = {
        "use_rollout_logprobs": "the trust region is around the policy that sampled the tokens, the engine's"
    }


def flags_or_defaults(settings: EstimatorSettings, kind: type[T]) -> T:
    """Return the estimator's own flags, or their defaults where a user's class derives from it,
    which has none.
    """
    return settings.own if isinstance(settings.own, kind) else kind()


def old_log_probs(batch: Entries) -> Sequence[Tensor]:
    """Return log π_old of each sample before the first step: the trainer's, or the engine's with
    ``--use-rollout-logprobs``.

    Raises:
        ValueError: The batch has neither.
    """
    for name in ("log_probs", "rollout_log_probs"):
        found: Sequence[Tensor] | None = batch.get(name)
        if found is not None:
            return found
    raise ValueError("the estimator needs log_probs or rollout_log_probs in the batch")


def notice_of_unused_clip(name: str, settings: EstimatorSettings) -> list[str]:
    """Return the notice for a clip range that this estimator does not read."""
    default = EstimatorSettings()
    given = (settings.eps_clip, settings.eps_clip_high)
    if given == (default.eps_clip, default.eps_clip_high):
        return []
    return [f"{name} does not clip the ratio: --eps-clip and --eps-clip-high have no effect"]


def by_sign(advantages: Tensor, positive: float, negative: float) -> Tensor:
    """Return ``positive`` where the advantage is above 0 and ``negative`` elsewhere, of its shape
    and dtype.
    """
    return advantages.new_full(advantages.shape, negative).masked_fill(advantages > 0, positive)
