"""Documented import path of the built-in ``--custom-tis-function-path`` hooks and of helpers for
loss functions.
"""

from slime.algorithms.mis import compute_mis_weights
from slime.algorithms.off_policy import icepop_function, vanilla_tis_function
from slime.plugins.compat.custom_losses import (
    get_log_probs_and_entropy,
    get_responses,
    policy_loss_function,
)

__all__ = [
    "compute_mis_weights", "get_log_probs_and_entropy", "get_responses", "icepop_function", "policy_loss_function",
    "vanilla_tis_function",
]  # fmt: skip
