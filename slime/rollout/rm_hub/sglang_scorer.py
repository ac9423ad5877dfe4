"""Documented import path; the code is in :mod:`slime.plugins.rewards.servers`."""

from slime.plugins.rewards.servers import score, score_group

__all__ = ["score", "score_group"]
