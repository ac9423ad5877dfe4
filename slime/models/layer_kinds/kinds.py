"""The kinds of layers that slime knows, each with what is particular to it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from slime.models.layer_kinds.kind import LayerKind, Place, whole_attention, with_state

# Attention to a number of tokens before. transformers passes it to the attention as ``sliding_window``.
#
# Packing, prompt sharing, context parallelism and engine: as full attention, with the window in the mask. The window
# counts the tokens of a shared prompt.


def is_windowed(place: Place) -> bool:
    """Whether the layer has a window. A config without ``layer_types`` has the same one for all layers, or none."""
    if not place.type:
        return bool(getattr(place.config, "sliding_window", None))
    return place.type == "sliding_attention"


IN_THE_MASK_ONLY = ("PhimoeAttention",)
"""Classes that do not pass the window of their config to the attention: transformers has it in their mask only."""


def window_of(module: nn.Module, passed: int | None) -> int | None:
    """Return how many tokens a query of an attention module sees, given what the module passes; None for all."""
    if passed is None and type(module).__name__ in IN_THE_MASK_ONLY:
        passed = module.config.sliding_window  # type: ignore[assignment, union-attr]
    return passed


SLIDING_WINDOW = LayerKind("sliding window", is_windowed, ("sliding_attention",))


# Attention to all tokens before: the kind of layer of most models.
#
# Packing: each segment attends to itself, and to the prompt that it shares. Context parallelism: ranks gather the keys
# and values (``slime/models/packed_attention.py``). Engine: a slot holds the keys and values.


def is_full(place: Place) -> bool:
    """Whether the layer attends to all tokens before. A config without ``layer_types`` has only one kind. A layer of
    type ``hybrid`` has another mixer beside its attention, whose kind explains the type."""
    return place.type in ("full_attention", "hybrid") or not (place.type or is_windowed(place))


FULL_ATTENTION = LayerKind("full attention", is_full, ("full_attention",))


# Attention sinks: the softmax of each head has one more key, with a learned score and the value 0 (gpt-oss).
#
# transformers passes the scores to the attention as ``s_aux``. Packing, prompt sharing, context parallelism and engine:
# as the attention that has the sinks, because a sink belongs to each query.

ATTENTION_SINKS = LayerKind(
    "attention sinks", lambda place: any(hasattr(module, "sinks") for module in place.layer.modules())
)


# Soft-capped attention scores (Gemma 2). transformers passes the cap to the attention as ``softcap``.
#
# Packing, prompt sharing, context parallelism and engine: as the attention that has the cap, because it changes each
# score alone. SDPA of transformers leaves the cap out without an error, so padded batches need ``--attn-implementation
# eager``.

SOFT_CAP = LayerKind("soft cap", lambda place: bool(getattr(place.config, "attn_logit_softcapping", None)))


# Gated delta nets with their short convolution: the linear attention of Qwen3-Next and Qwen3.5.
#
# transformers computes them, with the kernels of flash-linear-attention and causal-conv1d where these packages are
# installed. Source: Yang et al. 2024, https://arxiv.org/abs/2412.06464.

GATED_DELTA_NET = with_state("gated delta net", ("linear_attention",), ("GatedDeltaNet",))


# Short causal convolutions between two gates (LFM2).

SHORT_CONVOLUTION = with_state("short convolution", ("conv",), ("ShortConv",))


# Mamba-2 mixers (Nemotron-H, Granite 4, Bamba; beside attention in Falcon-H1). Source: Dao and Gu 2024,
# https://arxiv.org/abs/2405.21060.


def _bound_time_steps(mixer: nn.Module) -> None:
    """Bound the time steps ``softplus(dt + bias)`` from below in decode as well, as transformers does in prefill and
    training only. Otherwise the engine's log-probs of Nemotron-H differ from the trainer's by 1e-3."""
    limit = getattr(mixer, "time_step_limit", (0.0, math.inf))
    if limit[0] <= 0:
        return
    smallest = math.log(math.expm1(limit[0]))  # the inverse of softplus

    def bounded(projection: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        bias = mixer.dt_bias
        assert isinstance(bias, torch.Tensor)
        rest, steps = output.split([output.shape[-1] - len(bias), len(bias)], -1)
        return torch.cat([rest, torch.maximum(steps, (smallest - bias).to(steps.dtype))], -1)

    projection = mixer.in_proj
    assert isinstance(projection, nn.Module)
    projection.register_forward_hook(bounded)


MAMBA2_MIXERS = ("Mamba2Mixer", "MambaLayer", "BambaMixer", "FalconH1Mixer")
MAMBA2 = with_state("Mamba-2", ("linear_attention", "hybrid"), MAMBA2_MIXERS, _bound_time_steps)


# Layers that compute each token alone, where a model lists them as layers of their own (Nemotron-H).

WITHOUT_MIXING = ("mlp", "moe", "dense", "sparse")
NO_MIXING = LayerKind("no mixing", lambda place: place.type in WITHOUT_MIXING, WITHOUT_MIXING)


# Attention to the tokens that an indexer selects (DeepSeek V3.2, GLM-5).
#
# The indexer of transformers scores all tokens of a row. So the attention runs on whole sequences, and the indexer's
# scores need memory for ``index_n_heads`` values for each pair of tokens of a sequence. The indexer itself gets no
# gradient in transformers, so it keeps its weights. Source: https://arxiv.org/abs/2512.02556.


def has_indexer(place: Place) -> bool:
    return place.type == "indexed_attention" or bool(place.modules("Indexer"))


SPARSE_INDEXER = whole_attention("sparse indexer", has_indexer, ("indexed_attention",), indexers=("Indexer",))


# Attention inside chunks of fixed size, counted from the first token of a sequence (Llama 4).


def is_chunked(place: Place) -> bool:
    return place.type == "chunked_attention"


def same_chunk(config: PretrainedConfig, query: Tensor, key: Tensor) -> Tensor:
    size: int = config.attention_chunk_size
    return key // size == query // size


CHUNKED_ATTENTION = whole_attention("chunked attention", is_chunked, ("chunked_attention",), same_chunk)


# Queries that are scaled by the index of their row, in layers without rotary positions (Llama 4).
#
# Source: https://arxiv.org/abs/2501.19399. The index is the position only if the row is one sequence.


def is_tuned(place: Place) -> bool:
    modules = place.modules("Attention")
    return any(getattr(m, "attn_temperature_tuning", False) and not getattr(m, "use_rope", 0) for m in modules)


TEMPERATURE_TUNING = whole_attention("temperature tuning", is_tuned, ())
