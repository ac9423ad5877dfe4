"""Documented import path of statistics; the code is in :mod:`slime.observability.metric_utils`."""

from slime.observability.metric_utils import (
    compression_ratio,
    compute_pass_rate,
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
    has_repetition,
)

__all__ = [
    "compression_ratio", "compute_pass_rate", "compute_rollout_step", "compute_statistics", "dict_add_prefix",
    "has_repetition",
]  # fmt: skip
