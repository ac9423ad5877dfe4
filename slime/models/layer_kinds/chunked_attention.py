"""Attention inside chunks of fixed size, counted from the first token of a sequence (Llama 4)."""

from __future__ import annotations

from torch import Tensor
from transformers import PretrainedConfig

from slime.models.layer_kinds.kind import Place, whole_attention


def is_chunked(place: Place) -> bool:
    return place.type == "chunked_attention"


def same_chunk(config: PretrainedConfig, query: Tensor, key: Tensor) -> Tensor:
    size: int = config.attention_chunk_size
    return key // size == query // size


KIND = whole_attention("chunked attention", is_chunked, ("chunked_attention",), same_chunk)
