"""Attention over the KV slots, plugged into transformers' AttentionInterface.

The model sees one packed sequence ``[1, rows]`` in which rows belong to different requests. Its own
attention modules project and rotate; this function stores keys and values in the slots and attends.
Two ways, chosen per step:

- *rows*: every row attends alone (one query token) to the first positions of its slot. All decode steps,
  and everything in deterministic mode, where a row's shapes depend on its own length only.
- *segments*: several consecutive tokens of one slot attend together, causally. Prompts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from slime.engines.embedded.kv_cache import KVCache

NAME = "slime_slots"


@dataclass(frozen=True)
class RowGroup:
    """Rows ``start..end`` attend to ``length`` positions of slots ``slot, slot + 1, …`` (or all to ``slot``)."""

    start: int
    end: int
    slot: int
    same_slot: bool
    length: int


@dataclass(frozen=True)
class Segment:
    """Rows ``start..end`` are the last tokens of the first ``length`` positions of ``slot``."""

    start: int
    end: int
    slot: int
    length: int


@dataclass
class StepContext:
    """Where the rows of this forward belong. ``lengths[row]`` counts the row itself."""

    cache: KVCache
    write_index: torch.Tensor  # [rows] int64
    lengths: torch.Tensor | None = None  # [rows] int64; rows only
    groups: list[RowGroup] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    masks: dict[tuple[RowGroup | Segment, int | None], torch.Tensor] = field(default_factory=dict)

    def row_mask(self, group: RowGroup, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """``[rows, 1, 1, length]``: 0 where the row may look, -inf elsewhere."""
        key = (group, window)
        if key not in self.masks:
            assert self.lengths is not None
            lengths = self.lengths[group.start : group.end, None]
            positions = torch.arange(group.length, device=lengths.device)[None]
            hidden = positions >= lengths
            if window is not None:
                hidden |= positions < lengths - window
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=lengths.device)
            self.masks[key] = zeros.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self.masks[key]

    def segment_mask(self, segment: Segment, window: int | None, device: torch.device) -> torch.Tensor:
        """``[queries, length]`` bool: True where a query may look (bottom-right causal)."""
        key = (segment, window)
        if key not in self.masks:
            count = segment.end - segment.start
            queries = torch.arange(segment.length - count, segment.length, device=device)[:, None]
            positions = torch.arange(segment.length, device=device)[None]
            allowed = positions <= queries
            if window is not None:
                allowed &= positions > queries - window
            self.masks[key] = allowed
        return self.masks[key]


_step: StepContext | None = None
_progressed_at = 0.0


def set_step(step: StepContext | None) -> None:
    """Name the step that the next forward belongs to. One model thread per process, hence a global."""
    global _step
    _step = step


def progressed_at() -> float:
    """When a layer was last begun in this process (``time.monotonic()``; 0.0 for never): a long prefill makes no
    token for a while, but it goes on."""
    return _progressed_at


def register() -> None:
    """Make ``NAME`` known to transformers. No mask function goes with it, so models build no masks."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, slots_attention)


def slots_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """AttentionInterface entry.

    Args:
        query: ``[1, heads, rows, head_dim]``; key, value: ``[1, kv_heads, rows, head_dim]``.

    Returns:
        ``[1, rows, heads, value_dim]``.
    """
    global _progressed_at
    _progressed_at = time.monotonic()
    step = _step
    if step is None:
        raise RuntimeError("the attention function was called outside of an engine step")
    unsupported = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unsupported or not getattr(module, "is_causal", True):
        what = ", ".join(unsupported) or "attention that is not causal"
        raise NotImplementedError(f"{type(module).__name__} uses {what}, which the embedded engine does not support")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    step.cache.write(layer, step.write_index, key[0].transpose(0, 1), value[0].transpose(0, 1))
    keys, values = step.cache.keys[layer], step.cache.values[layer]
    heads, rows = query.shape[1], query.shape[2]
    out = query.new_empty(rows, heads, values.shape[3])
    for group in step.groups:
        mask = step.row_mask(group, sliding_window, query.dtype)
        _attend_rows(query, keys, values, mask, scaling, group, out)
    for segment in step.segments:
        _attend_segment(step, query, keys, values, scaling, sliding_window, segment, out)
    return out[None], None


def _attend_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    group: RowGroup,
    out: torch.Tensor,
) -> None:
    """Query heads that share a kv head become the query positions of one small attention: no head is repeated."""
    count, kv_heads = group.end - group.start, keys.shape[2]
    q = query[0, :, group.start : group.end].transpose(0, 1)  # [rows, heads, dim]
    q = q.reshape(count, kv_heads, -1, q.shape[-1])
    slots = slice(group.slot, group.slot + (1 if group.same_slot else count))
    k = keys[slots, : group.length].transpose(1, 2)
    v = values[slots, : group.length].transpose(1, 2)
    if group.same_slot:
        k, v = k.expand(count, -1, -1, -1), v.expand(count, -1, -1, -1)
    result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    out[group.start : group.end] = result.reshape(count, -1, result.shape[-1])


def _attend_segment(
    step: StepContext,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
    segment: Segment,
    out: torch.Tensor,
) -> None:
    q = query[:, :, segment.start : segment.end]
    repeat = query.shape[1] // keys.shape[2]
    k = keys[segment.slot, : segment.length].transpose(0, 1)[None]
    v = values[segment.slot, : segment.length].transpose(0, 1)[None]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    whole = segment.end - segment.start == segment.length
    if whole and (window is None or segment.length <= window):
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
    else:
        mask = step.segment_mask(segment, window, q.device)
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    out[segment.start : segment.end] = result[0].transpose(0, 1)
