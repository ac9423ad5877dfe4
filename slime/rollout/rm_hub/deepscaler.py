"""Documented import path; the code is in :mod:`slime.plugins.compat.reward_helpers`."""

from slime.plugins.compat.reward_helpers import get_deepscaler_rule_based_reward

__all__ = ["get_deepscaler_rule_based_reward"]
