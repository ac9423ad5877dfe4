"""Attention over the KV slots, registered with the AttentionInterface of transformers.

The input of the model is one packed sequence ``[1, rows]`` whose rows belong to different requests.
The attention modules of the model compute projections and rotary embeddings. The function here
stores keys and values in the slots and computes the attention. A step uses one of two methods:

- *rows*: Each row is one query token, which attends to the first positions of its slot. Decode
  steps use it, and in deterministic mode all steps do, because then the shapes for a row depend on
  its own length only.
- *segments*: Several consecutive tokens of one slot attend together with a causal mask. Prefill
  steps use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from slime.models.layer_kinds import window_of
from slime.models.masked_attention import ScoreChanges, masked_attention, same_image
from slime.plugins.embedded.kv_cache import KVCache

if TYPE_CHECKING:
    from slime.plugins.embedded.linear import NamedAdapters

NAME = "slime_slots"
QUERIES_AT_ONCE = 512
"""The most queries of a prompt whose scores are held at a time, if the model has attention sinks or
soft caps.
"""


@dataclass(frozen=True)
class RowGroup:
    """Rows ``start`` to ``end - 1``, computed in one call over the first ``length`` positions of
    their slots.

    The slots of the rows are ``slot, slot + 1, …``; with ``same_slot`` all rows are in ``slot``.
    """

    start: int
    end: int
    slot: int
    same_slot: bool
    length: int


@dataclass(frozen=True)
class Segment:
    """Rows ``start`` to ``end - 1``, which are the last of the first ``length`` tokens in
    ``slot``.
    """

    start: int
    end: int
    slot: int
    length: int


@dataclass(frozen=True)
class StateRun:
    """Rows ``start`` to ``end - 1``, computed in one call by layers that have a state.

    With ``one_slot`` they are consecutive tokens of ``slot``, otherwise one token of each of the
    slots from ``slot`` on. ``first``: the rows begin at position 0, so there is no state yet.
    """

    start: int
    end: int
    slot: int
    one_slot: bool
    first: bool

    @property
    def slots(self) -> slice:
        return slice(self.slot, self.slot + (1 if self.one_slot else self.end - self.start))


@dataclass(frozen=True)
class Bounds:
    """What limits the keys of a query besides causality.

    Attributes:
        window: How many tokens a query sees, including itself; None for all.
        sees: Functions of the positions of queries ``[..., 1]`` and keys that return whether the
            key may be seen.
    """

    window: int | None = None
    sees: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = ()

    def apply(self, allowed: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return which of the allowed keys are inside the bounds, bool as ``allowed``."""
        if self.window is not None:
            allowed = allowed & (key > query - self.window)
        for sees in self.sees:
            allowed = allowed & sees(query, key)
        return allowed


UNBOUNDED = Bounds()
Selected = Mapping[RowGroup | Segment, torch.Tensor | None]
"""The keys that an indexer has selected: for each group their positions, ``[rows, k]`` int64
ascending, and for each segment whether a key is selected, ``[queries, length]`` bool; None where
all are."""


@dataclass
class StepContext:
    """The slots and positions of the rows of one forward. It has groups or segments, depending on
    the method.

    Attributes:
        runs: The rows of layers with a state.
        keep_states: Whether these layers change the states of the slots.
        image_blocks: For a step of one whole prompt with images whose tokens attend to their whole
            image: the number of the image of each row, int64 ``[rows]``, and -1 for text.
        adapters: Those that requests choose by name, for modules that compute some rows at a time.
    """

    cache: KVCache
    write_index: torch.Tensor  # [rows] int64: slot * capacity + position
    # [rows] int64: tokens to attend to, including the row itself; for groups only
    lengths: torch.Tensor | None = None
    groups: list[RowGroup] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    runs: list[StateRun] = field(default_factory=list)
    keep_states: bool = True
    image_blocks: torch.Tensor | None = None
    adapters: NamedAdapters | None = None
    # Masks depend on the bounds but not on the layer, so all layers with the same bounds share one.
    masks: dict[tuple[RowGroup | Segment, Bounds], torch.Tensor] = field(default_factory=dict)

    @property
    def positions(self) -> torch.Tensor:
        """The position of each row in its slot, int64 ``[rows]``."""
        return self.write_index % self.cache.capacity

    def part(
        self, module: torch.nn.Module, start: int, end: int, each: bool
    ) -> AbstractContextManager[None]:
        """Let a module compute some rows only: see :meth:`NamedAdapters.part`."""
        return (
            nullcontext() if self.adapters is None else self.adapters.part(module, start, end, each)
        )

    def row_mask(self, group: RowGroup, bounds: Bounds, dtype: torch.dtype) -> torch.Tensor:
        """Return the mask of a group, ``[rows, 1, 1, length]``: 0 where the row may attend, -inf
        elsewhere.
        """
        key = group, bounds
        if key not in self.masks:
            assert self.lengths is not None
            queries = self.lengths[group.start : group.end, None] - 1
            positions = torch.arange(group.length, device=queries.device)[None]
            allowed = bounds.apply(positions <= queries, queries, positions)
            zeros = torch.zeros(allowed.shape, dtype=dtype, device=queries.device)
            self.masks[key] = zeros.masked_fill_(~allowed, float("-inf"))[:, None, None]
        return self.masks[key]

    def segment_mask(self, segment: Segment, bounds: Bounds, device: torch.device) -> torch.Tensor:
        """Return the mask of a segment, ``[queries, length]`` bool: True where a query may attend.

        The mask is causal and aligned to the bottom right, because the queries are the last tokens
        of the slot.
        """
        key = segment, bounds
        if key not in self.masks:
            count = segment.end - segment.start
            queries = torch.arange(segment.length - count, segment.length, device=device)[:, None]
            positions = torch.arange(segment.length, device=device)[None]
            allowed = positions <= queries
            if self.image_blocks is not None:
                allowed |= same_image(self.image_blocks, self.image_blocks)
            self.masks[key] = bounds.apply(allowed, queries, positions)
        return self.masks[key]


_step: StepContext | None = None
_progressed_at = 0.0


def set_step(step: StepContext | None) -> None:
    """Set the step of the next forward.

    It is a global because transformers gives the attention function no argument for it; a process
    has only one model thread.
    """
    global _step
    _step = step


def current_step() -> StepContext | None:
    """Return the step of the forward that runs now; None outside of a step."""
    return _step


def progressed_at() -> float:
    """Return the time at which a layer last started in this process (``time.monotonic()``; 0.0 for
    never).

    A long prefill produces no token for a while; this time shows that it still makes progress.
    """
    return _progressed_at


def register() -> None:
    """Register :data:`NAME` with transformers. No mask function is registered, so models build no
    masks.
    """
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
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    indices: Selected | None = None,
    bounds: Bounds = UNBOUNDED,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Store keys and values in the slots and compute the attention, as AttentionInterface calls it.

    Args:
        query: ``[1, heads, rows, head_dim]``. ``key`` and ``value`` are ``[1, kv_heads, rows,
            head_dim]``.
        indices: What the layer's indexer has selected. transformers passes it under this name.
        bounds: What :mod:`slime.plugins.embedded.states` passes through the attention module.

    Returns:
        The outputs, ``[1, rows, heads, value_dim]``, and None for the attention weights.

    Raises:
        NotImplementedError: The model uses an option of attention that is not implemented here.
    """
    # The health check sees that a long prompt makes progress.
    global _progressed_at
    _progressed_at = time.monotonic()
    step = _step
    if step is None:
        raise RuntimeError("the attention function was called outside of an engine step")
    # Options that would change the result are refused, never ignored.
    unsupported = [name for name in ("sinks", "position_bias") if kwargs.get(name) is not None]
    if unsupported or not getattr(module, "is_causal", True):
        what = ", ".join(unsupported) or "attention that is not causal"
        raise NotImplementedError(
            f"{type(module).__name__} uses {what}, which the embedded engine does not support"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    # Keys and values are written first: each row also attends to itself and to the other new rows
    # of its slot.
    step.cache.write(layer, step.write_index, key[0].transpose(0, 1), value[0].transpose(0, 1))
    keys = step.cache.keys[layer]
    values = step.cache.values[layer]
    # Rows of all groups and segments write into one output.
    heads = query.shape[1]
    rows = query.shape[2]
    out = query.new_empty(rows, heads, values.shape[3])
    changes = ScoreChanges(s_aux, softcap)
    bounds = Bounds(window_of(module, sliding_window), bounds.sees)
    for group in step.groups:
        mask = step.row_mask(group, bounds, query.dtype)
        chosen = None if indices is None else indices[group]
        _attend_rows(query, keys, values, mask, chosen, scaling, changes, group, out)
    for segment in step.segments:
        chosen = None if indices is None else indices[segment]
        _attend_segment(step, query, keys, values, scaling, bounds, chosen, changes, segment, out)
    return out[None], None


def _attend_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    chosen: torch.Tensor | None,
    scaling: float | None,
    changes: ScoreChanges,
    group: RowGroup,
    out: torch.Tensor,
) -> None:
    """Attend one query token per row. The query heads of a kv head become the query positions of
    one small attention, so that keys and values are not repeated for each query head.

    Args:
        chosen: The positions of the keys of each row, ``[rows, k]``; None for all.
    """
    count = group.end - group.start
    kv_heads = keys.shape[2]
    q = query[0, :, group.start : group.end].transpose(0, 1)  # [rows, heads, dim]
    q = q.reshape(count, kv_heads, -1, q.shape[-1])
    if chosen is None:
        k, v = (rows_of_group(store, group).transpose(1, 2) for store in (keys, values))
    else:  # only the selected keys are read
        slots = torch.arange(
            group.slot, group.slot + (1 if group.same_slot else count), device=keys.device
        )[:, None]
        k, v = (store[slots, chosen].transpose(1, 2) for store in (keys, values))
        mask = mask.gather(3, chosen[:, None, None])
    # A head is a key-value head here, so the sinks [heads] are those of its queries, [kv_heads,
    # heads / kv_heads].
    result = masked_attention(q, k, v, mask, scaling, changes)
    out[group.start : group.end] = result.reshape(count, -1, result.shape[-1])


def rows_of_group(store: torch.Tensor, group: RowGroup) -> torch.Tensor:
    """Return the first positions of the slot of each row, ``[rows, length, heads, dim]``, as a view
    of the store.
    """
    count = group.end - group.start
    if group.same_slot:
        return store[group.slot, : group.length].expand(count, -1, -1, -1)
    return store[group.slot : group.slot + count, : group.length]


def _attend_segment(
    step: StepContext,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    bounds: Bounds,
    chosen: torch.Tensor | None,
    changes: ScoreChanges,
    segment: Segment,
    out: torch.Tensor,
) -> None:
    # The queries of the segment, and the keys of its whole slot, repeated for each query head.
    q = query[:, :, segment.start : segment.end]
    repeat = query.shape[1] // keys.shape[2]
    k = keys[segment.slot, : segment.length].transpose(0, 1)[None]
    v = values[segment.slot, : segment.length].transpose(0, 1)[None]
    k = k.repeat_interleave(repeat, dim=1)
    v = v.repeat_interleave(repeat, dim=1)
    # is_causal aligns to the top left, which is right only if the queries start at position 0. It
    # needs no mask tensor.
    whole = segment.end - segment.start == segment.length and step.image_blocks is None
    bounded = bool(bounds.sees) or (bounds.window is not None and segment.length > bounds.window)
    if whole and changes.none and not bounded and chosen is None:
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
    else:
        mask = step.segment_mask(segment, bounds, q.device)
        mask = mask if chosen is None else mask & chosen
        part = q.shape[2] if changes.none else QUERIES_AT_ONCE
        queries = zip(q.split(part, 2), mask.split(part), strict=True)
        result = torch.cat(
            [masked_attention(some, k, v, seen, scaling, changes) for some, seen in queries], 2
        )
    out[segment.start : segment.end] = result[0].transpose(0, 1)
