"""Training with the unmodified megatron-core from PyPI, without Transformer Engine and Apex."""
