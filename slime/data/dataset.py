"""The prompts of a data file: rows are read, checked, rendered, filtered by length and shuffled for
each epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from slime.config.seeds import derive_seed
from slime.data.chunks import CHUNK, Chunks, Made, shuffled
from slime.data.masks import MultiTurnLossMaskGenerator, untrained
from slime.data.media import collect_media, is_remote, processor_inputs
from slime.data.prompts import PromptRow, Report, RowKeys, parse_rows
from slime.data.rows import DataError, Problems, RawRow, RowFile
from slime.data.sample import Sample
from slime.data.tokenizers import check_shown, render_prompt
from slime.types import Tokenizer

if TYPE_CHECKING:
    from transformers import ProcessorMixin

logger = logging.getLogger(__name__)

# rows with media that the processor is tried on before the start; it takes some 20 ms for each
PROCESSED_ROWS = 500


class PromptDataset(Protocol):
    """What a data source needs from a data set: a length, an order for each epoch, and prompts by
    position.
    """

    def __len__(self) -> int: ...

    def shuffle(self, epoch_id: int) -> None:
        """Change to the order of this epoch, which depends only on the seed and the epoch."""

    def __getitem__(self, position: int) -> Sample | None:
        """The prompt at a position of the current order, or None if it is too long.

        The caller must not modify it, but copy it.
        """


@dataclass
class PromptMaker:
    """Converts rows to prompts. Each worker process gets a copy, so all fields must be picklable.

    ``rendered_later`` says that the run itself renders prompts that stay messages, and
    ``mask_type`` that it trains conversations with loss masks of this type. Both are tried in
    :meth:`problem` only.
    """

    keys: RowKeys
    tokenizer: Tokenizer | None = None
    load_processor: Callable[[], ProcessorMixin | None] | None = None
    max_length: int | None = None
    apply_chat_template: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    rendered_later: bool = False
    mask_type: str | None = None
    checks: bool = False
    """Whether :meth:`problem` is asked about every row that is read, because nobody has asked
    before (streaming).
    """

    processed: int = field(default=0, init=False)
    masks: MultiTurnLossMaskGenerator | None = field(default=None, init=False)

    def __call__(self, raws: list[RawRow]) -> Made:
        """Return a sample for each valid row, or None if it is too long, and the report on all
        rows.
        """
        rows, report = self.parse(raws)
        samples = [sample for row in rows if (sample := self._sample(row, report)) is not None]
        long = self._too_long(samples)
        return [None if i in long else sample for i, sample in enumerate(samples)], report

    def parse(self, raws: list[RawRow]) -> tuple[list[PromptRow], Report]:
        """Parse rows as the run needs them; see :func:`parse_rows`."""
        wants_messages = self.apply_chat_template or self.mask_type is not None
        return parse_rows(raws, self.keys, self.apply_chat_template, json_messages=wants_messages)

    def problem(self, row: PromptRow) -> str | None:
        """Explain why the run could not use a row: what the chat template, the loss masks or the
        processor refuse.
        """
        # In the order in which the run would fail: no answer to train, no template for it, no
        # processor.
        prompt = row.prompt
        try:
            if self.mask_type is not None and (unfit := untrained(prompt)):
                return unfit
            if not isinstance(prompt, list) or self.tokenizer is None:
                return None
            media = collect_media(prompt)
            if self.mask_type is not None:
                self.masks = self.masks or MultiTurnLossMaskGenerator(
                    self.tokenizer, self.mask_type, self.template_kwargs
                )
                text = self.masks.check(prompt, row.tools)
            elif self.apply_chat_template or self.rendered_later:
                text = self._render(row, media)
            else:
                return None
            renderer = self._renderer(media)
            check_shown(renderer, prompt, text, tools=row.tools, **self.template_kwargs)
            if media and self.rendered_later:
                self._process(row, text, media)
        except DataError:  # no row could be used
            raise
        except ValueError as error:
            return str(error)
        return None

    def _sample(self, row: PromptRow, report: Report) -> Sample | None:
        # A row that cannot be rendered is a problem of the file, and is reported with the others.
        media = collect_media(row.prompt) if isinstance(row.prompt, list) else None
        prompt = row.prompt
        try:
            if self.checks and (problem := self.problem(row)):
                raise ValueError(problem)
            if self.apply_chat_template:
                prompt = self._render(row, media)
        except ValueError as error:
            report.add(row.where, error)
            return None
        sample = Sample(
            prompt=prompt, label=row.label, metadata=row.metadata, multimodal_inputs=media
        )
        sample.apply_chat_template_kwargs = dict(self.template_kwargs)
        return sample

    def _render(self, row: PromptRow, media: Mapping[str, object] | None) -> str:
        assert isinstance(row.prompt, list), "rows were parsed as messages"
        return render_prompt(
            self._renderer(media), row.prompt, tools=row.tools, **self.template_kwargs
        )

    def _renderer(self, media: Mapping[str, object] | None) -> Any:
        processor = self._processor() if media else None
        if media and processor is None and self.rendered_later:
            raise ValueError(
                f"it has {', '.join(media)}, but the model of --hf-checkpoint has no processor "
                "for media"
            )
        return processor or self.tokenizer

    def _process(self, row: PromptRow, text: str, media: Mapping[str, Sequence[object]]) -> None:
        """Try the processor on the first rows with images that need no download.

        Raises:
            ValueError: It fails, or the loss mask does not fit the ids that it makes.
        """
        # Only what can be tried quickly and without a network: the first rows stand for the others.
        if (
            self.processed >= PROCESSED_ROWS
            or media.keys() != {"images"}
            or any(map(is_remote, media["images"]))
        ):
            return
        self.processed += 1
        try:
            ids = self._processor()(text=[text], **processor_inputs(media))["input_ids"][0]
        # A processor is a program of the checkpoint and can fail in any way.
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0][:200]
            raise ValueError(
                f"the processor refuses its images: {type(error).__name__}: {reason}"
            ) from error
        if self.masks is not None:
            assert isinstance(row.prompt, list), "it has images"
            self.masks.get_loss_mask_with_multimodal_alignment(row.prompt, ids, row.tools)

    def _too_long(self, samples: list[Sample]) -> set[int]:
        """Indices of the text prompts, with or without media, that have more than ``max_length``
        tokens.
        """
        limit = self.max_length
        if limit is None:
            return set()
        # Prompts with media are measured one by one below: only the processor knows how many tokens
        # an image takes.
        texts = {
            i: s.prompt
            for i, s in enumerate(samples)
            if isinstance(s.prompt, str) and not s.multimodal_inputs
        }
        long = set()
        if texts:  # in one call, since a fast tokenizer encodes many texts in parallel
            assert self.tokenizer is not None, "a length limit needs a tokenizer"
            ids = self.tokenizer(list(texts.values()), add_special_tokens=False)["input_ids"]
            long = {i for i, tokens in zip(texts, ids, strict=True) if len(tokens) > limit}
        for i, sample in enumerate(samples):
            if (
                isinstance(sample.prompt, str)
                and sample.multimodal_inputs
                and (processor := self._processor())
            ):
                made = processor(text=[sample.prompt], **processor_inputs(sample.multimodal_inputs))
                if len(made["input_ids"][0]) > limit:
                    long.add(i)
        return long

    def _processor(self) -> Any:
        return None if self.load_processor is None else self.load_processor()


class Dataset:
    """The prompts of a ``.jsonl`` or ``.parquet`` file (``path@[a:b]`` takes a slice of its rows).

    Args:
        path: The file.
        tokenizer: Renders messages and counts tokens; only needed for these.
        load_processor: Returns the processor of a model that takes media, which renders and counts
            tokens of rows with media, or None for a text model. It is called when there is such a
            row: texts alone need no package for images.
        max_length: Longer prompts, in tokens, are left out; only checked for prompts that are
            texts.
        prompt_key, multimodal_keys, label_key, tool_key, metadata_key: Columns, see
            :class:`RowKeys`.
        seed: Seed of the order that :meth:`shuffle` makes.
        apply_chat_template: Render messages to text, with the generation header at the end.
        apply_chat_template_kwargs: Additional arguments of the template.
        streaming: Read rows when they are needed, and hold only a few hundred of them. The order is
            the same. Only the first rows are checked at the start; a later row that is wrong raises
            an error when it is reached. ``len`` counts all rows, including those that turn out to
            be too long.
        workers: Number of processes that parse, render and count tokens; 0: this process does it.
            The result is the same.
        make: Makes prompts of rows, in place of what the arguments from ``tokenizer`` to
            ``max_length`` and those about columns and the template say.

    Raises:
        DataError: Lists the problems of the file with their lines, at most about twenty.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Tokenizer | None = None,
        load_processor: Callable[[], ProcessorMixin | None] | None = None,
        max_length: int | None = None,
        *,
        prompt_key: str = "prompt",
        multimodal_keys: Mapping[str, str] | None = None,
        label_key: str | None = "label",
        tool_key: str | None = "tools",
        metadata_key: str | None = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: Mapping[str, object] | None = None,
        streaming: bool = False,
        workers: int = 0,
        make: PromptMaker | None = None,
    ) -> None:
        if make is None:
            keys = RowKeys(prompt_key, label_key, metadata_key, tool_key, multimodal_keys or {})
            kwargs = dict(apply_chat_template_kwargs or {})
            make = PromptMaker(
                keys, tokenizer, load_processor, max_length, apply_chat_template, kwargs
            )
        self.path = path
        self.seed = seed
        self.max_length = make.max_length
        self._rows = RowFile(path)
        self.file_bytes = self._rows.path.stat().st_size
        self._epoch: int | None = None  # None: the order of the file
        # samples by row; None: rows are read when needed (streaming)
        self._kept: list[Sample | None] | None = None
        self._chunks = Chunks(self._rows, make, self._order, workers)
        # The first chunk stands for the file: a wrong flag shows in any row.
        if streaming:
            self._check(self._chunks[0][1] if len(self._rows) else Report(make.keys))
        else:
            self._read_all(make.keys)
            self.shuffle(None)

    def _read_all(self, keys: RowKeys) -> None:
        # All chunks are read now, and their reports are joined, so that every problem of the file
        # is told at once.
        report = Report(keys)
        kept = []
        for chunk in range(-(-len(self._rows) // CHUNK)):
            samples, of_chunk = self._chunks[chunk]
            kept += samples
            report.merge(of_chunk)
        self._chunks.close()
        self._check(report)
        self._kept = kept
        left_out = kept.count(None)
        if left_out == len(kept):
            raise DataError(
                f"{self.path}: all {len(kept)} prompts are longer than --rollout-max-prompt-len "
                f"{self.max_length} (of an evaluation set: --eval-max-prompt-len, or "
                "max_prompt_len in --eval-config)"
            )
        if left_out:
            logger.warning(
                f"{self.path}: left out {left_out} of {len(kept)} prompts longer than "
                f"{self.max_length} tokens"
            )

    def _check(self, report: Report) -> None:
        problems = Problems()
        report.tell(self.path, problems)
        problems.raise_if_any()
        for warning in problems.warnings:
            logger.warning(warning)

    def __len__(self) -> int:
        return len(self._rows) if self._kept is None else len(self.samples)

    def __getitem__(self, position: int) -> Sample | None:
        if self._kept is not None:
            return self.samples[position]
        samples, report = self._chunks[position // CHUNK]
        report.wrong.raise_if_any()
        return samples[position % CHUNK]

    def shuffle(self, epoch_id: int | None) -> None:
        """Change to the order of an epoch, which does not depend on earlier ones. None: the order
        of the file.
        """
        self._epoch = epoch_id
        self._chunks.forget()
        # All rows are permuted and the long ones dropped afterwards, so that the order is the same
        # as with streaming.
        if self._kept is not None:
            order = self._order(range(len(self._rows)))
            self.samples = [sample for row in order if (sample := self._kept[row]) is not None]

    samples: list[Sample]
    """The prompts in the current order; does not exist with ``streaming``."""

    def _order(self, positions: range) -> list[int]:
        """The rows at these positions of the current order."""
        if self._epoch is None:
            return list(positions)
        return shuffled(positions, len(self._rows), derive_seed(self.seed, "shuffle", self._epoch))
