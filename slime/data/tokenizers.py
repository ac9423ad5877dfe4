"""Tokenizer and processor of a checkpoint, loaded once per process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from slime.types import Tokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def load_tokenizer(name_or_path: str | Path, **kwargs: object) -> Tokenizer:
    """Load the tokenizer of a folder or hub id; returns the same object for the same arguments.

    Args:
        kwargs: Arguments of ``AutoTokenizer.from_pretrained``, e.g. ``trust_remote_code=True``.

    Raises:
        FileNotFoundError: The folder does not exist, or has no tokenizer.
    """
    return _load_tokenizer(*_resolve(name_or_path), tuple(sorted(kwargs.items())))


def load_processor(name_or_path: str | Path, **kwargs: object) -> Any | None:
    """Load the processor of a model that takes images, videos or audio; None for a text model.

    Raises:
        FileNotFoundError: The folder does not exist.
    """
    return _load_processor(*_resolve(name_or_path), tuple(sorted(kwargs.items())))


@functools.cache
def _load_tokenizer(name: str, is_folder: bool, kwargs: tuple[tuple[str, object], ...]) -> Tokenizer:
    if is_folder and not any((Path(name) / file).is_file() for file in _TOKENIZER_FILES):
        raise FileNotFoundError(f"{name} holds no tokenizer (none of {', '.join(_TOKENIZER_FILES)})")
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(name, **dict(kwargs))
    return tokenizer


@functools.cache
def _load_processor(name: str, is_folder: bool, kwargs: tuple[tuple[str, object], ...]) -> Any | None:
    if is_folder and not any((Path(name) / file).is_file() for file in _PROCESSOR_FILES):
        return None
    from transformers import AutoProcessor, ProcessorMixin

    processor = AutoProcessor.from_pretrained(name, **dict(kwargs))
    return processor if isinstance(processor, ProcessorMixin) else None  # For a text model, it is the tokenizer.


def _resolve(name_or_path: str | Path) -> tuple[str, bool]:
    """(folder or hub id, whether it is a folder)"""
    if name_or_path is None or str(name_or_path) == "":
        raise FileNotFoundError("no checkpoint is given to load a tokenizer from: set --hf-checkpoint")
    name = str(name_or_path)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder), True
    if name.startswith((".", "/", "~")) or name.count("/") > 1:  # A hub id is "name" or "owner/name".
        raise FileNotFoundError(f"checkpoint folder {name} does not exist (looked for {folder.absolute()})")
    return name, False
