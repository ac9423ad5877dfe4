"""Images whose tokens attend to their whole image, also to the tokens after them (Gemma 3).

transformers adds these pairs to its masks, from the ``token_type_ids`` of the processor. Packs and the embedded engine
use no masks of transformers, so they add the pairs themselves: two tokens of the same block attend to each other.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from slime.models.loading import ModelError

KNOWN = ("gemma3",)


def images_see_ahead(backbone: nn.Module) -> bool:
    """Whether the tokens of an image attend to later tokens of it.

    Args:
        backbone: The image-text model without its head.

    Raises:
        ModelError: The family has such masks, or others that depend on the types of tokens, and slime does not know
            them.
    """
    config: Any = backbone.config
    if config.model_type in KNOWN:
        return True
    text = config.get_text_config()
    forward: Any = type(backbone).forward
    if getattr(text, "use_bidirectional_attention", None) or "token_type_ids" in inspect.signature(forward).parameters:
        raise ModelError(
            f"{type(backbone).__name__} has masks that depend on the types of tokens, which slime does not know: "
            "it can be trained on text only"
        )
    return False


def image_blocks_of(is_image: Tensor, starts: Tensor | None = None) -> Tensor:
    """Number the images of a row: runs of image tokens, as transformers finds them.

    Args:
        is_image: bool ``[T]``, whether each token is one of an image.
        starts: int64, the rows where a sample begins, which ends a run; None if there is one sample.

    Returns:
        int64 ``[T]``: the number of the image of each row, -1 for text.
    """
    begins = is_image.clone()
    begins[1:] &= ~is_image[:-1]
    if starts is not None:
        inside = starts[starts < len(is_image)]
        begins[inside] = is_image[inside]
    return torch.where(is_image, begins.cumsum(0) - 1, -1)


def same_image(query: Tensor, key: Tensor) -> Tensor:
    """Which pairs of tokens belong to the same image: ``[..., Q]`` and ``[..., K]`` -> bool ``[..., Q, K]``."""
    return (query.unsqueeze(-1) == key.unsqueeze(-2)) & (query >= 0).unsqueeze(-1)
