"""Documented import path; the code is in :mod:`slime.plugins.rewards.f1`."""

from slime.plugins.rewards.f1 import F1Score, f1_score, normalize_answer

__all__ = ["F1Score", "f1_score", "normalize_answer"]
