"""Prompts in memory: rows read, checked, rendered, filtered by length and put into an epoch's order."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any, Protocol

from slime.config.seeds import derive_seed
from slime.data.media import collect_media, processor_inputs
from slime.data.prompts import PromptRow, RowKeys, read_prompts
from slime.data.rows import DataError, Problems
from slime.data.sample import Sample

logger = logging.getLogger(__name__)
_TOKENIZE_AT_ONCE = 1024


class PromptDataset(Protocol):
    """What a data source needs of a data set: a length, an order per epoch, and prompts by position in it."""

    def __len__(self) -> int: ...

    def shuffle(self, epoch_id: int) -> None:
        """Put the prompts into the order of this epoch, which depends on seed and epoch alone."""

    def __getitem__(self, position: int) -> Sample:
        """The prompt at a position of the present order; the caller copies before it changes anything."""


class Dataset:
    """All prompts of a ``.jsonl`` or ``.parquet`` file (``path@[a:b]`` takes a slice of its rows).

    Args:
        path: of the file.
        tokenizer: renders messages and counts tokens; needed only for these.
        processor: of a model that takes media; renders and counts where a row has some.
        max_length: prompts (texts only) of more tokens are left out.
        prompt_key, multimodal_keys, label_key, tool_key, metadata_key: columns, see :class:`RowKeys`.
        seed: of the order that :meth:`shuffle` makes.
        apply_chat_template: render messages to text, with the header that asks for the answer.
        apply_chat_template_kwargs: further arguments of the template.

    Raises:
        DataError: everything that is wrong with the file, each with its line, up to twenty.
    """

    samples: list[Sample]
    """The prompts in the present order."""

    def __init__(
        self,
        path: str,
        tokenizer: Any = None,
        processor: Any = None,
        max_length: int | None = None,
        *,
        prompt_key: str = "prompt",
        multimodal_keys: Mapping[str, str] | None = None,
        label_key: str | None = "label",
        tool_key: str | None = "tools",
        metadata_key: str | None = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        problems = Problems()
        keys = RowKeys(prompt_key, label_key, metadata_key, tool_key, multimodal_keys or {})
        rows = read_prompts(path, keys, problems, as_messages=apply_chat_template)
        problems.raise_if_any()
        for warning in problems.warnings:
            logger.warning("%s", warning)
        kwargs = dict(apply_chat_template_kwargs or {})
        samples = []
        for row in rows:
            media = collect_media(row.prompt) if isinstance(row.prompt, list) else None
            renderer = processor if media and processor is not None else tokenizer
            prompt = _render(renderer, row, kwargs, problems) if apply_chat_template else row.prompt
            sample = Sample(prompt=prompt, label=row.label, metadata=row.metadata, multimodal_inputs=media)
            sample.apply_chat_template_kwargs = dict(kwargs)
            samples.append(sample)
        problems.raise_if_any()
        self.path, self.seed = path, seed
        self._in_file_order = _without_long(samples, tokenizer, processor, max_length, path)
        self.samples = list(self._in_file_order)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> Sample:
        return self.samples[position]

    def shuffle(self, epoch_id: int) -> None:
        """The order of an epoch; it does not depend on earlier ones."""
        order = list(range(len(self._in_file_order)))
        random.Random(derive_seed(self.seed, "shuffle", epoch_id)).shuffle(order)
        self.samples = [self._in_file_order[i] for i in order]


def _render(renderer: Any, row: PromptRow, kwargs: dict[str, Any], problems: Problems) -> str:
    from jinja2 import TemplateError

    try:
        return renderer.apply_chat_template(
            row.prompt, tools=row.tools, tokenize=False, add_generation_prompt=True, **kwargs
        )
    except TemplateError as error:  # templates refuse what their model was not trained on
        problems.add(f"{row.where}: the chat template refuses these messages: {error}")
        return ""


def _without_long(
    samples: list[Sample], tokenizer: Any, processor: Any, max_length: int | None, path: str
) -> list[Sample]:
    """Leave out text prompts of more than ``max_length`` tokens; the order stays."""
    if max_length is None:
        return samples
    texts = [i for i, s in enumerate(samples) if isinstance(s.prompt, str) and not s.multimodal_inputs]
    long: set[int] = set()
    for start in range(0, len(texts), _TOKENIZE_AT_ONCE):
        part = texts[start : start + _TOKENIZE_AT_ONCE]
        ids = tokenizer([samples[i].prompt for i in part], add_special_tokens=False)["input_ids"]
        long.update(i for i, tokens in zip(part, ids, strict=True) if len(tokens) > max_length)
    if processor is not None:
        for i, sample in enumerate(samples):
            if isinstance(sample.prompt, str) and sample.multimodal_inputs:
                media = processor_inputs(sample.multimodal_inputs)
                if len(processor(text=[sample.prompt], **media)["input_ids"][0]) > max_length:
                    long.add(i)
    if long:
        logger.warning("%s: left out %d of %d prompts longer than %d tokens", path, len(long), len(samples), max_length)
    if len(long) == len(samples):
        raise DataError([f"{path}: all {len(samples)} prompts are longer than --rollout-max-prompt-len {max_length}"])
    return [s for i, s in enumerate(samples) if i not in long]
