"""Tiny random image-text models of the families whose images are trained, and one image for
each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from every_family import DELTA, HYBRID, PAD, SLIDING, SMALL
from torch import Tensor
from transformers import AutoModelForImageTextToText

IMAGE, START, END = 60, 58, 59
"""The token of an image, and those before and after its place."""
PATCHES: dict[str, Any] = dict(
    depth=2, hidden_size=32, intermediate_size=48, num_heads=4, patch_size=4
)
MERGED = PATCHES | dict(
    spatial_merge_size=2, temporal_patch_size=1, out_hidden_size=32, initializer_range=0.2
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
PLACES = dict(
    image_token_id=IMAGE, video_token_id=57, vision_start_token_id=START, vision_end_token_id=END
)

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Qwen2.5-VL": (
        "Qwen2_5_VLConfig",
        dict(rope_parameters=ROPE),
        MERGED | dict(fullatt_block_indexes=[1], window_size=8),
        PLACES,
    ),
    "Qwen3-VL": (
        "Qwen3VLConfig",
        dict(rope_parameters=ROPE | {"mrope_interleaved": True}),
        MERGED | dict(num_position_embeddings=64, deepstack_visual_indexes=[0]),
        PLACES,
    ),
    "Qwen3.5": (
        "Qwen3_5Config",
        # with larger weights, a state of several tokens amplifies rounding above the tolerances on
        # some processors
        DELTA
        | HYBRID
        | dict(
            initializer_range=0.05,
            rope_parameters=ROPE | {"mrope_interleaved": True, "partial_rotary_factor": 1.0},
        ),
        MERGED | dict(num_position_embeddings=64),
        PLACES,
    ),
    "Gemma 3": (
        "Gemma3Config",
        SLIDING,
        dict(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
        ),
        dict(
            mm_tokens_per_image=4,
            image_token_index=IMAGE,
            boi_token_index=START,
            eoi_token_index=END,
        ),
    ),
}
"""Config class, and what its text part, its vision part and the whole have besides
:data:`SMALL`.
"""


def save_tiny_vision(family: str, folder: Path, **changes: Any) -> Path:
    name, text, vision, own = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(
        text_config=SMALL | text | changes, vision_config=vision, **own, tie_word_embeddings=True
    )
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight[PAD].normal_(std=0.2)
        for parameter in model.parameters():
            if not parameter.any():  # Gemma 3's projection of images
                parameter.normal_(std=0.2)
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def image(family: str, seed: int) -> dict[str, Tensor]:
    """One image of four tokens, as the family's processor would give it."""
    generator = torch.Generator().manual_seed(seed)
    if family == "Gemma 3":
        return {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}
    pixels = torch.randn(16, 3 * 4 * 4, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}
