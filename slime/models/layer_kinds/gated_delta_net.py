"""Gated delta nets with their short convolution: the linear attention of Qwen3-Next and Qwen3.5.

transformers computes them, with the kernels of flash-linear-attention and causal-conv1d where these packages are
installed. Source: Yang et al. 2024, https://arxiv.org/abs/2412.06464.
"""

from __future__ import annotations

from slime.models.layer_kinds.kind import with_state

KIND = with_state("gated delta net", ("linear_attention",), ("GatedDeltaNet",))
