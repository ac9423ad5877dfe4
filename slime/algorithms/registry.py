"""Names of ``--advantage-estimator`` and what each is made of, after the group baseline of its rewards.

A new algorithm is one file with its formulas, and one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from . import cispo, dr_grpo, gae, grpo, gspo, policy_loss, reinforce_plus_plus
from .reduce import Reduce
from .reductions import Reducer

Advantages = Callable[[Any, dict[str, Any]], tuple[list[Tensor], list[Tensor]]]
"""(args, rank batch with ``kl``) → advantages and returns, per sample ``[response_length]``."""

PolicyLoss = Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(args, ppo_kl, log_probs, advantages) → loss and clipfrac, each ``[R]``."""


class PpoKl(Protocol):
    """log π_old − log π_θ as the ratio of this algorithm sees it, ``[R]``."""

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, lengths: Sequence[int], reduce: Reduce
    ) -> Tensor: ...


@dataclass(frozen=True)
class Algorithm:
    """Advantages, ratio and policy loss of one estimator."""

    compute: Advantages
    ppo_kl: PpoKl = gspo.token_kl
    policy_loss: PolicyLoss = policy_loss.clipped_loss
    pg_reducer: Callable[..., Reducer] | None = None
    """Its own reduction of the policy loss, with the arguments of ``--custom-pg-loss-reducer-function-path``;
    None for that of the run."""


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(grpo.compute),
    "gspo": Algorithm(grpo.compute, ppo_kl=gspo.sequence_kl),
    "cispo": Algorithm(grpo.compute, policy_loss=cispo.cispo_loss),
    "rloo": Algorithm(grpo.compute),
    "dr_grpo": Algorithm(grpo.compute, pg_reducer=dr_grpo.pg_loss_reducer),
    "ppo": Algorithm(gae.compute),
    "reinforce_plus_plus": Algorithm(reinforce_plus_plus.compute),
    "reinforce_plus_plus_baseline": Algorithm(reinforce_plus_plus.compute_baseline),
}


def get_algorithm(name: str) -> Algorithm:
    """Raises ValueError with the known names."""
    if name not in ALGORITHMS:
        raise ValueError(f"unknown --advantage-estimator {name!r}; one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]
