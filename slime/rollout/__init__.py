"""Rollout functions, rewards and filters."""
