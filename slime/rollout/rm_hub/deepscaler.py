"""Documented import path of the rule of the reward ``deepscaler``, for users' reward functions."""

from slime.rollout.rm_hub.math_utils import get_deepscaler_rule_based_reward

__all__ = ["get_deepscaler_rule_based_reward"]
