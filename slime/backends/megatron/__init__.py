"""Training with megatron-core as it comes from PyPI: no Transformer Engine, no Apex, no patched source."""
