"""Documented import path; the code is in :mod:`slime.plugins.rewards.simple`."""

from slime.plugins.rewards.simple import F1Score, f1_score, normalize_answer

__all__ = ["F1Score", "f1_score", "normalize_answer"]
