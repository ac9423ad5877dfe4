"""Documented import path; the code is in :mod:`slime.plugins.rewards.gpqa`."""

from slime.plugins.rewards.gpqa import compute_gpqa_reward

__all__ = ["compute_gpqa_reward"]
