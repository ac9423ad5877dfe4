"""Tokenizer and processor of a checkpoint, loaded once per process, and what their chat templates make of messages."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.data.json_text import parse_json
from slime.types import Tokenizer

if TYPE_CHECKING:
    from transformers import ProcessorMixin

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")

# AutoTokenizer imports the modeling code of transformers and torch with it: 2.3 CPU seconds and 280 MB that a process
# of the rollout needs for nothing else. For these model types and classes in tokenizer_config.json, AutoTokenizer
# chooses the class that is named there, so that class is used directly. Everything else goes to AutoTokenizer.
_GENERIC = {
    name: "transformers.tokenization_utils_tokenizers:TokenizersBackend"
    for name in ("TokenizersBackend", "PreTrainedTokenizer")
}
_GPT2 = {"GPT2Tokenizer": "transformers.models.gpt2.tokenization_gpt2:GPT2Tokenizer"}
_QWEN2 = {"Qwen2Tokenizer": "transformers.models.qwen2.tokenization_qwen2:Qwen2Tokenizer"}
DIRECT_CLASSES: dict[str, dict[str, str]] = {
    "llama": _GENERIC | _GPT2,
    "qwen2": _QWEN2,
    "qwen3": _GENERIC | _QWEN2,
    "qwen3_moe": _GENERIC | _QWEN2,
}
"""Tokenizer class in ``tokenizer_config.json`` (without ``Fast``) -> ``module:class``, per model type."""


def load_tokenizer(name_or_path: str | Path, **kwargs: object) -> Tokenizer:
    """Load the tokenizer of a folder or hub id; returns the same object for the same arguments.

    Args:
        kwargs: Arguments of ``AutoTokenizer.from_pretrained``, e.g. ``trust_remote_code=True``.

    Raises:
        FileNotFoundError: The folder does not exist, or has no tokenizer.
    """
    return _load_tokenizer(*_resolve(name_or_path), tuple(sorted(kwargs.items())))


def preload_tokenizer(name_or_path: str | Path, trust_remote_code: bool) -> None:
    """Load a tokenizer for later. A failure is left to the first :func:`load_tokenizer`, which may never come."""
    with contextlib.suppress(Exception):
        load_tokenizer(name_or_path, **({"trust_remote_code": True} if trust_remote_code else {}))


def load_processor(name_or_path: str | Path, **kwargs: object) -> Any | None:
    """Load the processor of a model that takes images, videos or audio; None for a text model.

    Raises:
        FileNotFoundError: The folder does not exist.
    """
    return _load_processor(*_resolve(name_or_path), tuple(sorted(kwargs.items())))


def render_chat(renderer: Tokenizer | ProcessorMixin, messages: Sequence[Mapping[str, Any]], **options: object) -> str:
    """Render messages as text with the chat template of a tokenizer or processor.

    Most templates write the arguments of tool calls as JSON or go through their names, so they need objects. In many
    data sets arguments are JSON text, as in OpenAI's API, which such templates quote once more or refuse. Templates
    that add arguments to a text need text.

    Args:
        options: Arguments of ``apply_chat_template``.
    """
    apply: Callable[..., object] = renderer.apply_chat_template
    try:
        return str(apply(_with_arguments(messages, _as_object), tokenize=False, **options))
    except TypeError:
        if not any(message.get("tool_calls") for message in messages):
            raise
        return str(apply(_with_arguments(messages, _as_text), tokenize=False, **options))


def _with_arguments(messages: Sequence[Mapping[str, Any]], convert: Callable[[object], object]) -> list[dict[str, Any]]:
    """Copy messages; the arguments of their tool calls are converted."""

    def converted(call: object) -> object:
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": converted(call["function"])}
        return {**call, "arguments": convert(call["arguments"])} if "arguments" in call else call

    made = [dict(message) for message in messages]
    for message in made:
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = [converted(call) for call in calls]
    return made


def _as_object(arguments: object) -> object:
    try:
        parsed = parse_json(arguments or "{}") if isinstance(arguments, str) else None
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _as_text(arguments: object) -> object:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


@functools.cache
def _load_tokenizer(name: str, is_folder: bool, kwargs: tuple[tuple[str, object], ...]) -> Tokenizer:
    if is_folder and not any((Path(name) / file).is_file() for file in _TOKENIZER_FILES):
        raise FileNotFoundError(f"{name} holds no tokenizer (none of {', '.join(_TOKENIZER_FILES)})")
    direct = _direct_class(Path(name)) if is_folder and dict(kwargs).keys() <= {"trust_remote_code"} else None
    if direct is not None:
        tokenizer: Any = direct.from_pretrained(name)
        return tokenizer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, **dict(kwargs))
    return tokenizer


def _direct_class(folder: Path) -> Any | None:
    """The class that ``AutoTokenizer`` would choose for a folder, or None if only ``AutoTokenizer`` knows it."""
    try:
        model = json.loads((folder / "config.json").read_bytes())
        tokenizer = json.loads((folder / "tokenizer_config.json").read_bytes())
        if not (folder / "tokenizer.json").is_file() or "auto_map" in tokenizer or "auto_map" in model:
            return None  # auto_map names code in the folder, which --trust-remote-code allows
        known = DIRECT_CLASSES.get(model["model_type"], {})
        path = known.get(tokenizer["tokenizer_class"].removesuffix("Fast"))
        module, name = path.split(":") if path else ("", "")
        return getattr(importlib.import_module(module), name) if module else None
    except (OSError, ValueError, LookupError, AttributeError, TypeError, ImportError):
        return None  # A file that is missing or not as expected: AutoTokenizer reports it.


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
