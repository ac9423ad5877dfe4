"""Compute the model's forward for one plan: packed rows in, logits of the wanted rows out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from slime.models.masked_attention import image_blocks_of, images_see_ahead
from slime.plugins.embedded import attention
from slime.plugins.embedded.kv_cache import KVCache
from slime.plugins.embedded.linear import PackedLinears
from slime.plugins.embedded.named_adapters import NamedAdapters
from slime.plugins.embedded.rows import Rows, blocks_of, row_context, rows_of, segment_context
from slime.plugins.embedded.scheduler import Plan, Work
from slime.plugins.embedded.slots import Copy

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

FIXED_ROWS = (1, 8, 16, 32, 64)
"""The row counts that deterministic mode may use. At startup, those that give the same bits are selected."""


@dataclass
class Logits:
    """The logits of some wanted rows. ``values`` is ``[≥ len(owners), vocab]``, with padding rows at the end."""

    values: torch.Tensor
    owners: list[int]
    positions: list[int]


class Runner:
    """Owns the model, the KV cache and the packed weights, and computes plans."""

    def __init__(
        self, model: PreTrainedModel, dtype: torch.dtype, device: torch.device, deterministic: bool = False
    ) -> None:
        self.model = model
        self.device = device
        self.deterministic = deterministic
        self.cache = KVCache(dtype, device)
        self.adapters = NamedAdapters(model)
        self.packed = PackedLinears(model) if PackedLinears.available(device, dtype) else None
        self.row_counts: tuple[int, ...] = (max(FIXED_ROWS),)
        self.attend_alone = False
        self.position_axes = _position_axes(model.config)

    def weights_changed(self) -> None:
        if self.packed is not None:
            self.packed.stale = True

    @torch.inference_mode()
    def run(self, plan: Plan) -> Iterator[Logits]:
        """Compute a plan, and yield the logits of its wanted rows.

        The KV of shared prompts is copied to the followers before the last logits are yielded.
        """
        # Sequences that ended may have left slots that no longer exist when the others become longer. So the slots move
        # while all of them are there.
        if plan.num_slots < self.cache.num_slots:
            self.cache.move(plan.moves)
            self.cache.resize(plan.num_slots, plan.capacity)
        else:
            self.cache.resize(plan.num_slots, plan.capacity)
            self.cache.move(plan.moves)
        if self.packed is not None:
            self.packed.refresh()
        if len(plan.works) == 1 and plan.works[0].sequence.has_images and not plan.decode:
            yield self._image_prefill(plan.works[0])
            return
        images = [work for work in plan.works if work.sequence.has_images and not plan.decode]
        texts = [work for work in plan.works if work not in images]
        for work in images:
            done = self._image_prefill(work)
            yield Logits(done.values, [plan.works.index(work)] * len(done.owners), done.positions)
        if texts:
            yield from self._text_step(plan, texts)

    def _text_step(self, plan: Plan, works: list[Work]) -> Iterator[Logits]:
        rows = rows_of(works)
        index = [plan.works.index(work) for work in works]
        copies = [Copy(work.sequence.slot, follower.slot, work.end) for work in works for follower in work.followers]
        if self.deterministic:
            blocks = blocks_of(rows, max(self.row_counts))
            outputs = [self._fixed_block(block) for block in blocks]
        elif plan.decode:
            blocks = [rows]
            outputs = [self.forward(rows, row_context(self.cache, rows, fixed=False), rows.wanted)]
        else:
            blocks = [rows]
            outputs = [self.forward(rows, segment_context(self.cache, works, rows), rows.wanted)]
        # The followers get their copy now, because the moves of the next plan may overwrite the leader's slot.
        self.cache.move(copies)
        for block, values in zip(blocks, outputs, strict=True):
            if values is not None:
                owners = [index[owner] for owner in block.owners]
                yield Logits(values, owners, [block.positions[row] for row in block.wanted])

    def _fixed_block(self, block: Rows) -> torch.Tensor | None:
        """Compute a block padded to one of ``row_counts``. The rows for the logits are padded too."""
        wanted = list(block.wanted)
        block.pad(self.fixed_count(len(block)), self.cache.bin_slot)
        wanted += [len(block) - 1] * (self.fixed_count(len(wanted)) - len(wanted))
        return self.forward(block, row_context(self.cache, block, True, self.attend_alone), wanted)

    def fixed_count(self, rows: int) -> int:
        return min((count for count in self.row_counts if count >= rows), default=max(self.row_counts))

    def stack(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Stack the logits of several sequences. In deterministic mode they are padded to a fixed row count."""
        if self.deterministic:
            rows = [*rows, *[rows[-1]] * (self.fixed_count(len(rows)) - len(rows))]
        return torch.stack(list(rows))

    def forward(self, rows: Rows, step: attention.StepContext, wanted: Sequence[int]) -> torch.Tensor | None:
        """Return the logits ``[len(wanted), vocab]`` in the dtype of the model, or None if no rows are wanted."""
        self._start(step, rows)
        try:
            output = self.model(
                input_ids=torch.tensor([rows.tokens], device=self.device),
                position_ids=self._position_ids(rows),
                use_cache=False,
                logits_to_keep=torch.tensor(wanted or [0], device=self.device),
            )
        finally:
            attention.set_step(None)
        return output.logits[0] if wanted else None

    def _start(self, step: attention.StepContext, rows: Rows) -> None:
        self.adapters.select(rows.adapters, self.device)
        step.adapters = self.adapters
        attention.set_step(step)

    def _position_ids(self, rows: Rows) -> torch.Tensor:
        if not self.position_axes:
            return torch.tensor([rows.positions], device=self.device)
        shifted = [position + shift for position, shift in zip(rows.positions, rows.shifts, strict=True)]
        return torch.tensor([[shifted]], device=self.device).expand(self.position_axes, 1, -1)

    def _image_prefill(self, work: Work) -> Logits:
        """Compute one whole prompt with images. The model merges the image features into the embeddings itself."""
        seq = work.sequence
        part = Work(seq, 0, work.end, work.sample)
        rows = rows_of([part])
        step = segment_context(self.cache, [part], rows)
        inner = getattr(self.model, "model", self.model)
        inputs = _extended(seq.request.image_inputs or {}, work.end)
        if images_see_ahead(inner):
            types = inputs["token_type_ids"]
            assert isinstance(types, torch.Tensor)
            step.image_blocks = image_blocks_of(types[0] == 1)
        if hasattr(inner, "rope_deltas"):  # otherwise the model would use the deltas of the last prompt
            inner.rope_deltas = None
        self._start(step, rows)
        try:
            output = self.model(
                input_ids=torch.tensor([seq.tokens[: work.end]], device=self.device),
                use_cache=False,
                logits_to_keep=torch.tensor(rows.wanted, device=self.device),
                **inputs,
            )
        finally:
            attention.set_step(None)
        deltas = getattr(inner, "rope_deltas", None)
        if deltas is not None:
            seq.position_shift = int(deltas.flatten()[0])
        return Logits(output.logits[0], rows.owners, [rows.positions[row] for row in rows.wanted])


def _extended(inputs: Mapping[str, object], length: int) -> dict[str, object]:
    """Return the inputs of the processor, with per-token inputs (``[1, prompt]``) padded to ``length``.

    A sequence that was retracted has output tokens that are computed together with its prompt. They have type 0.
    """
    out = {}
    for key, value in inputs.items():
        if key in ("input_ids", "attention_mask"):
            continue
        if isinstance(value, torch.Tensor) and key.endswith("token_type_ids") and value.shape[-1] < length:
            value = torch.nn.functional.pad(value, (0, length - value.shape[-1]))
        out[key] = value
    return out


def _position_axes(config: PretrainedConfig) -> int:
    """Return the number of rotary position axes: 3 (time, height, width) in some vision-language models, else 0."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rope = getattr(text, "rope_parameters", None) or {}
    return 3 if isinstance(rope, dict) and "mrope_section" in rope else 0
