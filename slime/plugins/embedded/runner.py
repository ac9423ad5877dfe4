"""Compute the model's forward for one plan: packed rows in, logits of the wanted rows out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from slime.models.masked_attention import image_blocks_of, images_see_ahead
from slime.models.token_log_probs import Kernels
from slime.plugins.embedded import attention
from slime.plugins.embedded.attention import RowGroup, Segment, StateRun, StepContext
from slime.plugins.embedded.graphs import DecodeGraphs
from slime.plugins.embedded.kv_cache import Copy, KVCache
from slime.plugins.embedded.linear import NamedAdapters, PackedLinears
from slime.plugins.embedded.scheduler import Plan, Work

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


# of one attention call, as the number of positions that cost as much
CALL_COST = {"cpu": 700, "cuda": 500_000}
# the most rows times length of one call; more does not fit a CPU's caches
GROUP_AREA = {"cpu": 8192, "cuda": 2**31}
LENGTH_STEP = 16  # attention lengths are rounded up to a multiple of this
# the same for deterministic mode, where shapes may depend on a row's own length only
FIXED_LENGTH_STEP = 64


@dataclass
class Rows:
    """The rows of one forward; each list except ``wanted``, ``owners`` and ``adapters`` has one
    entry per row.

    Attributes:
        positions: The position of each row in its sequence.
        shifts: What to add to the position for the rotary embedding of models with multimodal
            positions.
        adapters: The key of the adapter of each row (:mod:`slime.plugins.embedded.linear`); empty
            if no row has a named one.
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
        """Add rows up to ``count``. They write to the bin slot, so they change no KV of a
        sequence.
        """
        missing = count - len(self)
        self.tokens += [0] * missing
        self.positions += [0] * missing
        self.shifts += [0] * missing
        self.slots += [bin_slot] * missing
        self.adapters += [0] * missing if self.adapters else []


def rows_of(works: Sequence[Work]) -> Rows:
    """Return the rows of all tokens of a plan, in order. Wanted are rows for prompt log-probs and
    for sampling.
    """
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
    """Divide rows into forwards of at most ``size`` rows. Later forwards attend to the KV of
    earlier ones.
    """
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
    """Return a context in which every row attends separately, in groups of rows that share an
    attention call.

    Args:
        fixed: Whether the attention length of a row must depend on its own position only.
        alone: Whether each row is computed in its own call.
    """
    slots = torch.tensor(rows.slots)
    positions = torch.tensor(rows.positions)
    step = FIXED_LENGTH_STEP if fixed else LENGTH_STEP
    groups = []
    start = 0
    while start < len(rows):
        if alone:
            end = start + 1
        else:
            end = (
                _fixed_group_end(rows, start)
                if fixed
                else _near_group_end(rows, start, cache.device.type)
            )
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
    """Return the runs of rows that are one token of a slot each. With ``alone``, each row is a
    run.
    """
    runs = []
    start = 0
    while start < len(rows):
        end = start + 1
        first = rows.positions[start] == 0
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
    """Return the end of the longest range of rows from ``start`` that are in one slot, or in
    consecutive slots.
    """
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
    end = start + 1
    last = _neighbours(rows, start)
    block = rows.positions[start] // FIXED_LENGTH_STEP
    while end < last and rows.positions[end] // FIXED_LENGTH_STEP == block:
        end += 1
    return end


def _near_group_end(rows: Rows, start: int, device: str) -> int:
    """Return the end of the neighbors from ``start`` for which padding to the longest costs less
    than another call.
    """
    end = start + 1
    last = _neighbours(rows, start)
    longest = rows.positions[start] + 1
    # One call for n rows reads n times the longest length. A separate call for the next row adds
    # CALL_COST.
    while end < last:
        length = rows.positions[end] + 1
        count = end - start
        together = (end - start + 1) * max(longest, length)
        if together > GROUP_AREA[device] or together > count * longest + length + CALL_COST[device]:
            break
        longest = max(longest, length)
        end += 1
    return end


def segment_context(cache: KVCache, works: Sequence[Work], rows: Rows) -> StepContext:
    """Return a context in which the tokens of each work attend together with a causal mask."""
    index = torch.tensor(rows.slots) * cache.capacity + torch.tensor(rows.positions)
    segments = []
    runs = []
    start = 0
    for work in works:
        end = start + work.end - work.start
        segments.append(Segment(start, end, work.sequence.slot, work.end))
        runs.append(StateRun(start, end, work.sequence.slot, True, work.start == 0))
        start = end
    return StepContext(cache, write_index=index.to(cache.device), segments=segments, runs=runs)


FIXED_ROWS = (1, 8, 16, 32, 64)
"""The row counts that deterministic mode may use. At startup, those that give the same bits are
selected.
"""


@dataclass
class Logits:
    """The logits of some wanted rows. ``values`` is ``[≥ len(owners), vocab]``, with padding rows
    at the end.
    """

    values: torch.Tensor
    owners: list[int]
    positions: list[int]


class Runner:
    """Owns the model, the KV cache and the packed weights, and computes plans."""

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool = False,
    ) -> None:
        self.model = model
        self.device = device
        self.deterministic = deterministic
        self.cache = KVCache(dtype, device)
        self.adapters = NamedAdapters(model)
        self.kernels: Kernels | None = None
        self.packed = PackedLinears(model) if PackedLinears.available(device, dtype) else None
        self.row_counts: tuple[int, ...] = (max(FIXED_ROWS),)
        self.attend_alone = False
        self.graphs: DecodeGraphs | None = None
        self.position_axes = _position_axes(model.config)

    def weights_changed(self) -> None:
        if self.packed is not None:
            self.packed.stale = True

    @torch.inference_mode()
    def run(self, plan: Plan) -> Iterator[Logits]:
        """Compute a plan, and yield the logits of its wanted rows.

        The KV of shared prompts is copied to the followers before the last logits are yielded.
        """
        # Sequences that ended may have left slots that no longer exist when the others become
        # longer. So the slots move while all of them are there.
        if plan.num_slots < self.cache.num_slots:
            self.cache.move(plan.moves)
            self.cache.resize(plan.num_slots, plan.capacity)
        else:
            self.cache.resize(plan.num_slots, plan.capacity)
            self.cache.move(plan.moves)
        if self.packed is not None:
            self.packed.refresh()
        texts = []  # the indices of the works of a text
        for index, work in enumerate(plan.works):
            if work.sequence.has_images and not plan.decode:
                done = self._image_prefill(work)
                yield Logits(done.values, [index] * len(done.owners), done.positions)
            else:
                texts.append(index)
        if texts:
            yield from self._text_step(plan, texts)

    def _text_step(self, plan: Plan, index: list[int]) -> Iterator[Logits]:
        works = [plan.works[i] for i in index]
        rows = rows_of(works)
        copies = [
            Copy(work.sequence.slot, follower.slot, work.end)
            for work in works
            for follower in work.followers
        ]
        if self.deterministic:
            blocks = blocks_of(rows, max(self.row_counts))
            outputs = [self._fixed_block(block) for block in blocks]
        elif plan.decode:
            blocks = [rows]
            outputs = [self._decode(rows)]
        else:
            blocks = [rows]
            outputs = [self.forward(rows, segment_context(self.cache, works, rows), rows.wanted)]
        # The followers get their copy now, because the moves of the next plan may overwrite the
        # leader's slot.
        self.cache.move(copies)
        for block, values in zip(blocks, outputs, strict=True):
            if values is not None:
                owners = [index[owner] for owner in block.owners]
                yield Logits(values, owners, [block.positions[row] for row in block.wanted])

    def _decode(self, rows: Rows) -> torch.Tensor | None:
        """Compute one token of each sequence, as a graph if there is one for this step."""
        if self.graphs is not None and (logits := self.graphs.forward(rows)) is not None:
            return logits
        return self.forward(rows, row_context(self.cache, rows, fixed=False), rows.wanted)

    def _fixed_block(self, block: Rows) -> torch.Tensor | None:
        """Compute a block padded to one of ``row_counts``. The rows for the logits are padded
        too.
        """
        wanted = list(block.wanted)
        block.pad(self.fixed_count(len(block)), self.cache.bin_slot)
        wanted += [len(block) - 1] * (self.fixed_count(len(wanted)) - len(wanted))
        return self.forward(block, row_context(self.cache, block, True, self.attend_alone), wanted)

    def fixed_count(self, rows: int) -> int:
        return min(
            (count for count in self.row_counts if count >= rows), default=max(self.row_counts)
        )

    def stack(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Stack the logits of several sequences. In deterministic mode they are padded to a fixed
        row count.
        """
        if self.deterministic:
            rows = [*rows, *[rows[-1]] * (self.fixed_count(len(rows)) - len(rows))]
        return torch.stack(list(rows))

    def forward(
        self, rows: Rows, step: attention.StepContext, wanted: Sequence[int]
    ) -> torch.Tensor | None:
        """Return the logits ``[len(wanted), vocab]`` in the dtype of the model, or None if no rows
        are wanted.
        """
        self.adapters.select(rows.adapters, self.device)
        logits = self.compute(
            step,
            input_ids=torch.tensor([rows.tokens], device=self.device),
            position_ids=self._position_ids(rows),
            logits_to_keep=torch.tensor(wanted or [0], device=self.device),
        )
        return logits if wanted else None

    def compute(self, step: attention.StepContext, **inputs: object) -> torch.Tensor:
        """Return the logits ``[rows, vocab]`` that the model computes for a step, with the adapters
        that are selected.
        """
        step.adapters = self.adapters
        attention.set_step(step)
        try:
            output = self.model(use_cache=False, **inputs)
        finally:
            attention.set_step(None)
        logits: torch.Tensor = output.logits[0]
        return logits

    def _position_ids(self, rows: Rows) -> torch.Tensor:
        if not self.position_axes:
            return torch.tensor([rows.positions], device=self.device)
        shifted = [
            position + shift for position, shift in zip(rows.positions, rows.shifts, strict=True)
        ]
        return torch.tensor([[shifted]], device=self.device).expand(self.position_axes, 1, -1)

    def _image_prefill(self, work: Work) -> Logits:
        """Compute one whole prompt with images. The model merges the image features into the
        embeddings itself.
        """
        seq = work.sequence
        # The whole prompt is one segment from position 0.
        part = Work(seq, 0, work.end, work.sample)
        rows = rows_of([part])
        step = segment_context(self.cache, [part], rows)
        inner = getattr(self.model, "model", self.model)
        # What the processor made of the images.
        inputs = _extended(seq.request.image_inputs or {}, work.end)
        if images_see_ahead(inner):
            types = inputs["token_type_ids"]
            assert isinstance(types, torch.Tensor)
            step.image_blocks = image_blocks_of(types[0] == 1)
        # otherwise the model would use the deltas of the last prompt
        if hasattr(inner, "rope_deltas"):
            inner.rope_deltas = None
        self.adapters.select(rows.adapters, self.device)
        logits = self.compute(
            step,
            input_ids=torch.tensor([seq.tokens[: work.end]], device=self.device),
            logits_to_keep=torch.tensor(rows.wanted, device=self.device),
            **inputs,
        )
        # Later tokens continue at the rotary position at which the images ended.
        deltas = getattr(inner, "rope_deltas", None)
        if deltas is not None:
            seq.position_shift = int(deltas.flatten()[0])
        return Logits(logits, rows.owners, [rows.positions[row] for row in rows.wanted])


def _extended(inputs: Mapping[str, object], length: int) -> dict[str, object]:
    """Return the inputs of the processor, with per-token inputs (``[1, prompt]``) padded to
    ``length``.

    A sequence that was retracted has output tokens that are computed together with its prompt. They
    have type 0.
    """
    out = {}
    for key, value in inputs.items():
        if key in ("input_ids", "attention_mask"):
            continue
        if (
            isinstance(value, torch.Tensor)
            and key.endswith("token_type_ids")
            and value.shape[-1] < length
        ):
            value = torch.nn.functional.pad(value, (0, length - value.shape[-1]))
        out[key] = value
    return out


def _position_axes(config: PretrainedConfig) -> int:
    """Return the number of rotary position axes: 3 (time, height, width) in some vision-language
    models, else 0.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rope = getattr(text, "rope_parameters", None) or {}
    return 3 if isinstance(rope, dict) and "mrope_section" in rope else 0
