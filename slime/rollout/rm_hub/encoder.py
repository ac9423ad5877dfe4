"""Documented import path of the reward by an encoder."""

from slime.plugins.rewards.encoder import EmbeddingSimilarity

__all__ = ["EmbeddingSimilarity"]
