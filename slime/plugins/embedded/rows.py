"""Convert a plan to the rows of a forward: the slot and position of each token, and the groups for attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from slime.plugins.embedded.attention import RowGroup, Segment, StateRun, StepContext
from slime.plugins.embedded.kv_cache import KVCache
from slime.plugins.embedded.scheduler import Work

CALL_COST = {"cpu": 700, "cuda": 500_000}  # of one attention call, as the number of positions that cost as much
GROUP_AREA = {"cpu": 8192, "cuda": 2**31}  # the most rows times length of one call; more does not fit a CPU's caches
LENGTH_STEP = 16  # attention lengths are rounded up to a multiple of this
FIXED_LENGTH_STEP = 64  # the same for deterministic mode, where shapes may depend on a row's own length only


@dataclass
class Rows:
    """The rows of one forward; each list except ``wanted``, ``owners`` and ``adapters`` has one entry per row.

    Attributes:
        positions: The position of each row in its sequence.
        shifts: What to add to the position for the rotary embedding of models with multimodal positions.
        adapters: The key of the adapter of each row (:mod:`slime.plugins.embedded.named_adapters`); empty if no row
            has a named one.
        wanted: The rows whose logits are needed, in order.
        owners: For each of these rows, the index of the work that it belongs to.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    shifts: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    adapters: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def pad(self, count: int, bin_slot: int) -> None:
        """Add rows up to ``count``. They write to the bin slot, so they change no KV of a sequence."""
        missing = count - len(self)
        self.tokens += [0] * missing
        self.positions += [0] * missing
        self.shifts += [0] * missing
        self.slots += [bin_slot] * missing
        self.adapters += [0] * missing if self.adapters else []


def rows_of(works: Sequence[Work]) -> Rows:
    """Return the rows of all tokens of a plan, in order. Wanted are rows for prompt log-probs and for sampling."""
    rows = Rows()
    named = any(work.sequence.adapter_key for work in works)
    for owner, work in enumerate(works):
        seq = work.sequence
        rows.adapters += [seq.adapter_key] * (work.end - work.start) if named else []
        first = len(rows)
        rows.tokens += seq.tokens[work.start : work.end]
        rows.positions += range(work.start, work.end)
        rows.shifts += [seq.position_shift] * (work.end - work.start)
        rows.slots += [seq.slot] * (work.end - work.start)
        scored = range(max(seq.score_from, work.start), min(seq.prompt_len - 1, work.end))
        wanted = [first + position - work.start for position in scored]
        if work.sample:
            wanted.append(len(rows) - 1)
        rows.wanted += wanted
        rows.owners += [owner] * len(wanted)
    return rows


def blocks_of(rows: Rows, size: int) -> list[Rows]:
    """Divide rows into forwards of at most ``size`` rows. Later forwards attend to the KV of earlier ones."""
    blocks = []
    for start in range(0, len(rows), size):
        end = min(start + size, len(rows))
        picked = [i for i, row in enumerate(rows.wanted) if start <= row < end]
        blocks.append(
            Rows(
                rows.tokens[start:end],
                rows.positions[start:end],
                rows.shifts[start:end],
                rows.slots[start:end],
                [rows.wanted[i] - start for i in picked],
                [rows.owners[i] for i in picked],
                rows.adapters[start:end],
            )
        )
    return blocks


def row_context(cache: KVCache, rows: Rows, fixed: bool, alone: bool = False) -> StepContext:
    """Return a context in which every row attends separately, in groups of rows that share an attention call.

    Args:
        fixed: Whether the attention length of a row must depend on its own position only.
        alone: Whether each row is computed in its own call.
    """
    slots, positions = torch.tensor(rows.slots), torch.tensor(rows.positions)
    step = FIXED_LENGTH_STEP if fixed else LENGTH_STEP
    groups = []
    start = 0
    while start < len(rows):
        if alone:
            end = start + 1
        else:
            end = _fixed_group_end(rows, start) if fixed else _near_group_end(rows, start, cache.device.type)
        longest = max(rows.positions[start:end]) + 1
        length = min(-(-longest // step) * step, cache.capacity)
        same = end - start > 1 and rows.slots[start] == rows.slots[start + 1]
        groups.append(RowGroup(start, end, rows.slots[start], same, length))
        start = end
    return StepContext(
        cache,
        write_index=(slots * cache.capacity + positions).to(cache.device),
        lengths=(positions + 1).to(cache.device),
        groups=groups,
        runs=_state_runs(rows, fixed),
    )


def _state_runs(rows: Rows, alone: bool) -> list[StateRun]:
    """Return the runs of rows that are one token of a slot each. With ``alone``, each row is a run."""
    runs, start = [], 0
    while start < len(rows):
        end, first = start + 1, rows.positions[start] == 0
        while (
            not (alone or first)
            and end < len(rows)
            and rows.slots[end] == rows.slots[end - 1] + 1
            and rows.positions[end] > 0
        ):
            end += 1
        runs.append(StateRun(start, end, rows.slots[start], end - start == 1, first))
        start = end
    return runs


def _neighbours(rows: Rows, start: int) -> int:
    """Return the end of the longest range of rows from ``start`` that are in one slot, or in consecutive slots."""
    end = start + 1
    stride = None
    while end < len(rows):
        jump = rows.slots[end] - rows.slots[end - 1]
        if jump not in (0, 1) or (stride is not None and jump != stride):
            break
        stride = jump
        end += 1
    return end


def _fixed_group_end(rows: Rows, start: int) -> int:
    """Return the end of the neighbors from ``start`` that attend to the same rounded length."""
    end, last = start + 1, _neighbours(rows, start)
    block = rows.positions[start] // FIXED_LENGTH_STEP
    while end < last and rows.positions[end] // FIXED_LENGTH_STEP == block:
        end += 1
    return end


def _near_group_end(rows: Rows, start: int, device: str) -> int:
    """Return the end of the neighbors from ``start`` for which padding to the longest costs less than another call."""
    end, last = start + 1, _neighbours(rows, start)
    longest = rows.positions[start] + 1
    # One call for n rows reads n times the longest length. A separate call for the next row adds CALL_COST.
    while end < last:
        length = rows.positions[end] + 1
        count, together = end - start, (end - start + 1) * max(longest, length)
        if together > GROUP_AREA[device] or together > count * longest + length + CALL_COST[device]:
            break
        longest = max(longest, length)
        end += 1
    return end


def segment_context(cache: KVCache, works: Sequence[Work], rows: Rows) -> StepContext:
    """Return a context in which the tokens of each work attend together with a causal mask."""
    index = torch.tensor(rows.slots) * cache.capacity + torch.tensor(rows.positions)
    segments, runs = [], []
    start = 0
    for work in works:
        end = start + work.end - work.start
        segments.append(Segment(start, end, work.sequence.slot, work.end))
        runs.append(StateRun(start, end, work.sequence.slot, True, work.start == 0))
        start = end
    return StepContext(cache, write_index=index.to(cache.device), segments=segments, runs=runs)
