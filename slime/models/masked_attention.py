"""Attention with a mask: the masks of images, and the selection of an indexer.

SDPA has neither attention sinks nor soft-capped scores, so with them attention is computed from
plain matrix products. The trainer and the embedded engine use this function for both.

The tokens of some images attend to their whole image, also to the tokens after them (Gemma 3).
transformers adds these pairs to its masks, from the ``token_type_ids`` of the processor. Packs and
the embedded engine use no masks of transformers, so they add the pairs themselves: two tokens of
the same block attend to each other.

Layers with an indexer (DeepSeek V3.2, GLM-5) attend to the keys that it selects. transformers
computes the indexer's scores of all pairs of tokens of a row, and masks the scores of its attention
with a square. Here both are computed for a block of queries of one sample at a time, so memory
grows with a block times the sample, and what is kept of a selection is ``index_topk`` positions for
each query. Both training backends use this. The scores are those of transformers' own indexer,
which gets no gradient. Source: https://arxiv.org/abs/2512.02556.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slime.models.loading import ModelError
from slime.models.segments import PackSegments, gather_rows


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


SCORES_AT_ONCE = 2**27
"""The most scores (queries times heads times keys) of an indexer that are held at a time, of 4
bytes each.
"""
BLOCK = 1024
"""The queries of a block of attention, which has one mask."""

Rotary = tuple[Tensor, Tensor]
Forward = Callable[..., Any]


def select_in_blocks(attention: nn.Module) -> None:
    """Let an attention module of transformers compute packs, and its indexer, if it has one, select
    in blocks. Without a pack, both compute as before.

    The module must be loaded with the implementation of :mod:`slime.models.packed_attention`.
    """
    attention.forward = torch.compiler.disable(
        types.MethodType(_with_pack(attention.forward), attention)
    )
    indexer = attention._modules.get("indexer")
    if indexer is not None:
        indexer.forward = types.MethodType(_with_selection(indexer.forward), indexer)


def _with_pack(plain: Forward) -> Forward:
    def forward(self: nn.Module, hidden_states: Tensor, **kwargs: Any) -> Any:
        if (pack := kwargs.get("slime_pack")) is not None:
            # Nothing reads this mask. It has the axes that the module takes apart for its indexer.
            kwargs["attention_mask"] = hidden_states.new_zeros(1, 1, 1, 1)
            kwargs["past_key_values"] = _PackCache(pack)
        return plain(hidden_states=hidden_states, **kwargs)

    return forward


def _with_selection(plain: Forward) -> Forward:
    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        q_resid: Tensor,
        rotary: Rotary,
        *args: object,
        past_key_values: object = None,
    ) -> Tensor:
        if isinstance(past_key_values, _PackCache):
            pack = past_key_values.pack
            return select_keys(self, plain, hidden_states, q_resid, rotary, pack)
        found: Tensor = plain(
            hidden_states, q_resid, rotary, *args, past_key_values=past_key_values
        )
        return found

    return forward


class _PackCache:
    """What the module uses of transformers' ``Cache``: it brings the pack to the indexer."""

    def __init__(self, pack: PackSegments) -> None:
        self.pack = pack

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return the latents of keys and values ``[1, 1, T, d]`` of all context-parallel ranks,
        which are much smaller than keys and values; with Ulysses those of this rank."""
        pack = self.pack
        if pack.group is None or pack.whole is not None:
            return key, value
        key, value = (gather_rows(x.transpose(0, 2), pack.group) for x in (key, value))
        return key.transpose(0, 2), value.transpose(0, 2)


class _IndexKeys:
    """What an indexer uses of transformers' ``Cache``: ``keys``, ``[1, K, d]``, stand for those of
    its rows, which are kept in ``own``."""

    def __init__(self, keys: Tensor | None = None) -> None:
        self.keys = keys

    def update_indexer(self, key: Tensor, layer_idx: int) -> Tensor:
        self.own = key
        return key[:, :1] if self.keys is None else self.keys


@torch.no_grad()
def select_keys(
    indexer: Any,
    forward: Forward,
    hidden_states: Tensor,
    q_resid: Tensor,
    rotary: Rotary,
    pack: PackSegments,
) -> Tensor:
    """Select the keys of each query of a pack.

    Args:
        indexer: The indexer of transformers; ``forward`` is its own forward.
        hidden_states: ``[1, T, H]``; with context parallelism, the rows of this rank.
        q_resid: ``[1, T, q_lora_rank]``, the normalized latents of the queries.
        rotary: Cosines and sines of the rows, each ``[1, T, rotary dims]``.

    Returns:
        int32 ``[1, T, index_topk]``: places of keys among those of the query's segment. A query with
        no more keys than that attends to all of them, whatever its places are. ``[1, T, 0]`` if no
        query of the pack has more.
    """
    rows, topk = hidden_states.shape[1], int(indexer.index_topk)
    segments = pack if pack.whole is None else pack.whole
    # Ranks that gather know the longest of their own segments only, and must agree.
    if segments.max_k <= topk and segments.group is None:
        return hidden_states.new_zeros(1, rows, 0, dtype=torch.int32)

    def run(first: int, last: int, keys: _IndexKeys, mask: Tensor) -> Tensor:
        here = slice(first, last)
        turned = rotary[0][:, here], rotary[1][:, here]
        chosen: Tensor = forward(
            hidden_states[:, here], q_resid[:, here], turned, mask, None, past_key_values=keys
        )
        return chosen

    keys = _keys_of_all(run, rows, pack)
    selected = hidden_states.new_zeros(rows, topk, dtype=torch.int32)
    # With Ulysses the segments are those of all ranks.
    offset = 0 if pack.whole is None or pack.group is None else rows * pack.group.rank()
    for q_start, q_end, k_start, k_end in segments.spans:
        end = min(q_end, offset + rows)
        step = max(1, SCORES_AT_ONCE // (int(indexer.n_heads) * (k_end - k_start)))
        for first in range(max(q_start, offset), end, step):
            last = min(first + step, end)
            seen = k_end - k_start - (q_end - last)
            if seen > topk:
                mask = torch.zeros(last - first, seen, device=keys.device)
                mask.masked_fill_(~_causal(mask), -torch.inf)
                of_segment = _IndexKeys(keys[None, k_start : k_start + seen])
                here = first - offset, last - offset
                selected[slice(*here)] = run(*here, of_segment, mask[None])[0]
    return selected[None]


def _keys_of_all(run: Forward, rows: int, pack: PackSegments) -> Tensor:
    """Return the indexer's keys of all segments, ``[K, d]``, of which ``run`` computes those of some
    rows, with their scores for one key."""
    own = []
    for first in range(0, rows, BLOCK):
        found = _IndexKeys()
        mask = torch.zeros(1, 1, 1, device=pack.cu_seqlens_q.device)
        run(first, min(first + BLOCK, rows), found, mask)
        own.append(found.own[0])
    keys = pack.rows_of_all(torch.cat(own))
    return keys if pack.kv_index is None else keys.index_select(0, pack.kv_index)


def attend_to_selected(
    q: Tensor, k: Tensor, v: Tensor, pack: PackSegments, scale: float, selected: Tensor
) -> Tensor:
    """Compute attention over a pack to the selected keys. Backward computes each block again.

    Args:
        q: ``[T, H, d]``; k: ``[K, H, d]``; v: ``[K, H, d_v]``, of all rows to which
            ``pack.kv_index`` refers.
        selected: int32 ``[T, index_topk]``, as :func:`select_keys` returns it.

    Returns:
        ``[T, H, d_v]``.
    """
    parts = []
    for q_start, q_end, k_start, k_end in pack.spans:
        for first in range(q_start, q_end, BLOCK):
            last = min(first + BLOCK, q_end)
            keys: Any = slice(k_start, k_end - (q_end - last))
            keys = keys if pack.kv_index is None else pack.kv_index[keys]
            block = q[first:last], k, v, keys, scale, selected[first:last]
            parts.append(checkpoint(_attend, *block, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(parts)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, keys: slice | Tensor, scale: float, selected: Tensor
) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k[keys], v[keys]))
    rows, seen, topk = q.shape[2], k.shape[2], selected.shape[1]
    mask = torch.zeros(rows, seen, dtype=torch.bool, device=q.device)
    causal = _causal(mask)
    if seen > topk:
        # The first queries have no more keys than are selected, and places after these.
        mask.scatter_(1, selected.long().clamp_(max=seen - 1), True)
        mask[: max(0, topk - (seen - rows))] = True
        causal &= mask
    return masked_attention(q, k, v, causal, scale)[0].transpose(0, 1)


def _causal(like: Tensor) -> Tensor:
    """Return a bool mask of the shape of ``like``, ``[rows, keys]``. The queries are the last of
    the keys."""
    rows, seen = like.shape
    return torch.ones_like(like, dtype=torch.bool).tril(seen - rows)
