"""Attention with a mask, and the masks of images.

SDPA has neither attention sinks nor soft-capped scores, so with them attention is computed from
plain matrix products. The trainer and the embedded engine use this function for both.

The tokens of some images attend to their whole image, also to the tokens after them (Gemma 3).
transformers adds these pairs to its masks, from the ``token_type_ids`` of the processor. Packs and
the embedded engine use no masks of transformers, so they add the pairs themselves: two tokens of
the same block attend to each other.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slime.models.loading import ModelError


@dataclass(frozen=True)
class ScoreChanges:
    """What a model does to attention scores besides scaling and masking them.

    Attributes:
        sinks: ``[H]`` (or ``[H, L_q]``, if the queries of a head have different ones). Each softmax
            has one more key with this score, whose value is 0 (gpt-oss,
            https://arxiv.org/abs/2508.10925).
        softcap: Scores are ``softcap · tanh(score / softcap)`` (Gemma 2,
            https://arxiv.org/abs/2408.00118).
    """

    sinks: Tensor | None = None
    softcap: float | None = None

    @property
    def none(self) -> bool:
        return self.sinks is None and not self.softcap


UNCHANGED = ScoreChanges()


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float | None,
    changes: ScoreChanges = UNCHANGED,
) -> Tensor:
    """Compute attention.

    Args:
        q: ``[n, H, L_q, d]``; k: ``[n, H_kv, L_k, d]``; v: ``[n, H_kv, L_k, d_v]``; H is a multiple
            of H_kv.
        mask: Broadcasts to ``[n, 1, L_q, L_k]``: bool, True where a query may attend, or float,
            added to the scores.
        scale: The factor of the scores; None for ``d**-0.5``.

    Returns:
        ``[n, H, L_q, d_v]``.
    """
    if changes.none:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k = k.repeat_interleave(repeat, 1)
        v = v.repeat_interleave(repeat, 1)
    scores = (q @ k.transpose(2, 3)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if changes.softcap:
        scores = torch.tanh(scores / changes.softcap) * changes.softcap
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if changes.sinks is not None:
        sinks = (
            changes.sinks.to(scores.dtype)
            .reshape(1, q.shape[1], -1, 1)
            .expand(*scores.shape[:3], 1)
        )
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v


KNOWN = ("gemma3",)


def images_see_ahead(backbone: nn.Module) -> bool:
    """Whether the tokens of an image attend to later tokens of it.

    Args:
        backbone: The image-text model without its head.

    Raises:
        ModelError: The family has such masks, or others that depend on the types of tokens, and
            slime does not know them.
    """
    config: Any = backbone.config
    if config.model_type in KNOWN:
        return True
    text = config.get_text_config()
    forward: Any = type(backbone).forward
    if (
        getattr(text, "use_bidirectional_attention", None)
        or "token_type_ids" in inspect.signature(forward).parameters
    ):
        raise ModelError(
            f"{type(backbone).__name__} has masks that depend on the types of tokens, which slime "
            "does not know: it can be trained on text only"
        )
    return False


def image_blocks_of(is_image: Tensor, starts: Tensor | None = None) -> Tensor:
    """Number the images of a row: runs of image tokens, as transformers finds them.

    Args:
        is_image: bool ``[T]``, whether each token is one of an image.
        starts: int64, the rows where a sample begins, which ends a run; None if there is one
            sample.

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
    """Which pairs of tokens belong to the same image: ``[..., Q]`` and ``[..., K]`` -> bool ``[...,
    Q, K]``.
    """
    return (query.unsqueeze(-1) == key.unsqueeze(-2)) & (query >= 0).unsqueeze(-1)
