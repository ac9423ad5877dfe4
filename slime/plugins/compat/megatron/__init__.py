"""Checkpoints that Megatron-LM wrote."""
