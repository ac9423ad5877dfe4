"""Documented import path of the metrics of samples; the code is in :mod:`slime.rollout.metrics`."""

from slime.plugins.compat.helpers import compute_perf_metrics_from_samples
from slime.rollout.metrics import compute_metrics_from_samples

__all__ = ["compute_metrics_from_samples", "compute_perf_metrics_from_samples"]
