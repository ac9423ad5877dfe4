"""Documented import path of tokenizers, processors and media; the code is in :mod:`slime.data`."""

from slime.data.media import (
    build_processor_kwargs,
    encode_image_for_rollout_engine,
    process_vision_info,
)
from slime.data.tokenizers import load_processor, load_tokenizer

__all__ = [
    "build_processor_kwargs", "encode_image_for_rollout_engine", "load_processor", "load_tokenizer",
    "process_vision_info",
]  # fmt: skip
