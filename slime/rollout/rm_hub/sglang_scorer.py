"""Documented import path; the code is in :mod:`slime.plugins.rewards.sglang_scorer`."""

from slime.plugins.rewards.sglang_scorer import score, score_group

__all__ = ["score", "score_group"]
