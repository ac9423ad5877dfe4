"""Documented import path of the formulas; the code is in :mod:`slime.algorithms`."""

from slime.algorithms.gae import get_advantages_and_returns_batch
from slime.algorithms.grpo import compute_cispo_loss, compute_gspo_kl, get_grpo_returns
from slime.algorithms.losses import compute_approx_kl, compute_policy_loss
from slime.algorithms.off_policy import compute_opsm_mask
from slime.algorithms.reinforce_plus_plus import (
    get_reinforce_plus_plus_baseline_advantages,
    get_reinforce_plus_plus_returns,
)

__all__ = [
    "compute_approx_kl",
    "compute_cispo_loss",
    "compute_gspo_kl",
    "compute_opsm_mask",
    "compute_policy_loss",
    "get_advantages_and_returns_batch",
    "get_grpo_returns",
    "get_reinforce_plus_plus_baseline_advantages",
    "get_reinforce_plus_plus_returns",
]
