"""Advantages, KL and losses: pure functions of tensors, each with its formula and its source."""
