"""Dr. GRPO: no division by the group's standard deviation and none by the response's length.

``--advantage-estimator dr_grpo`` subtracts the mean of the group from the rewards, and divides the
sum over tokens by a constant: ``dr_grpo_divisor`` (``--custom-config-path``), or by default
``--rollout-max-response-len``. Other estimators can use the reducer with
``--custom-pg-loss-reducer-function-path slime.algorithms.dr_grpo.pg_loss_reducer``.

Source: Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective" (2025).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from .algorithm import Row, custom_setting
from .baselines import centred
from .grpo import Grpo
from .sequences import Reducer, constant_reducer, flatten

if TYPE_CHECKING:
    from torch import Tensor


class _Args(Protocol):
    @property
    def rollout_max_response_len(self) -> int: ...


def pg_loss_reducer(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool,
    *,
    args: _Args,
) -> Reducer:
    """Return a reducer that computes the sum of m·x / divisor over a micro-batch."""
    divisor = custom_setting(args, "dr_grpo_divisor", None) or args.rollout_max_response_len
    return constant_reducer(flatten(loss_masks), float(divisor))


class DrGrpo(Grpo):
    """GRPO without the division by the standard deviation, and with a constant divisor of the
    loss.
    """

    zero_advantage_has_no_gradient = True  # the reduction is linear
    forbids: ClassVar[Mapping[str, str]] = {
        "calculate_per_token_loss": "the estimator divides by a constant, the flag divides by the number of tokens"
    }
    row = Row(
        "r − mean of the group",
        "clipped ρ, summed over tokens and divided by `--rollout-max-response-len`",
        "",
        "Liu et al. 2025",
    )

    def group_baseline(self, rewards: Sequence[float]) -> Sequence[float]:
        return centred(rewards)

    def pg_reducer(self, mask: Tensor, default: Reducer) -> Reducer:
        divisor = self.settings.custom.get("dr_grpo_divisor") or self.settings.max_response_len
        return constant_reducer(mask, float(divisor))
