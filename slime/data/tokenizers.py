"""Tokenizer and processor of a checkpoint, loaded once per process, and what their chat templates
make of messages.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.hf_config import end_token_ids, looks_like_hub_id
from slime.config.process import ONE_AT_A_TIME
from slime.data.plain_values import parse_json
from slime.data.rows import DataError
from slime.types import Tokenizer

if TYPE_CHECKING:
    from transformers import ProcessorMixin

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)

# AutoTokenizer imports the modeling code of transformers and torch with it: 2.3 CPU seconds and 280
# MB that a process of the rollout needs for nothing else. For these model types and classes in
# tokenizer_config.json, AutoTokenizer chooses the class that is named there, so that class is used
# directly. Everything else goes to AutoTokenizer.
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
"""Tokenizer class in ``tokenizer_config.json`` (without ``Fast``) -> ``module:class``, per model
type.
"""


def load_tokenizer(
    name_or_path: str | Path, trust_remote_code: bool = False, **kwargs: object
) -> Tokenizer:
    """Load the tokenizer of a folder or hub id; returns the same object for the same arguments.

    Args:
        kwargs: Further arguments of ``AutoTokenizer.from_pretrained``.

    Raises:
        FileNotFoundError: The folder does not exist, or has no tokenizer.
    """
    with ONE_AT_A_TIME:
        return load_cached(*_resolve(name_or_path, trust_remote_code, kwargs))


def preload_tokenizer(name_or_path: str | Path, trust_remote_code: bool) -> None:
    """Load a tokenizer for later. A failure is left to the first :func:`load_tokenizer`, which may
    never come.
    """
    with contextlib.suppress(Exception):
        load_tokenizer(name_or_path, trust_remote_code)


def load_processor(
    name_or_path: str | Path, trust_remote_code: bool = False, **kwargs: object
) -> Any | None:
    """Load the processor of a model that takes images, videos or audio; None for a text model.

    Raises:
        FileNotFoundError: The folder does not exist.
    """
    with ONE_AT_A_TIME:
        return _load_processor(*_resolve(name_or_path, trust_remote_code, kwargs))


LoadOptions = tuple[tuple[str, object], ...]
"""Keyword arguments of ``from_pretrained``, as a key of a cache."""
_PROBE = "slime.probe.text"
_ROLES = ("system", "user", "assistant", "tool", "developer", "function")
_template_takes_text: dict[str, bool] = {}


class TemplateRefusal(ValueError):
    """A chat template failed on messages; the message is one line and does not say which ones."""


def render_prompt(
    renderer: Tokenizer | ProcessorMixin, messages: Sequence[Mapping[str, Any]], **options: object
) -> str:
    """Render messages as a prompt: up to the generation header, or, if the last message is an
    assistant's, up to the end of its words, which the model continues.

    Raises:
        ValueError: The last message is an assistant's and has no words or calls tools, or the
            template changes it.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        return render_chat(renderer, messages, add_generation_prompt=True, **options)
    if last.get("tool_calls") or not (joined_text(last.get("content")) or "").strip():
        raise ValueError(
            "the prompt ends with an assistant's message that has no words which the model could "
            "continue"
        )
    try:
        return render_chat(renderer, messages, continue_final_message=True, **options)
    except TemplateRefusal as error:
        raise TemplateRefusal(
            "the prompt ends with an assistant's message, which the model would continue, but "
            f"{error}"
        ) from error


def check_shown(
    renderer: Tokenizer | ProcessorMixin,
    messages: Sequence[Mapping[str, Any]],
    text: str,
    tools: Sequence[object] | None = None,
    **options: object,
) -> None:
    """Check that the chat template writes each message that is not an assistant's, an assistant's
    tool calls, and tools.

    Args:
        text: The rendered messages.

    Raises:
        TemplateRefusal: It leaves one out, or only writes the name of a role that it does not know.
    """
    # Templates drop what they do not know without an error, so the rendered text is searched for
    # each message.
    template = str(getattr(renderer, "chat_template", None))
    known = _names(tools or ())
    contents = " ".join(str(message.get("content")) for message in messages)
    if known and not any(name in text for name in known):
        raise TemplateRefusal(
            "the chat template does not write the tools of the row: describe them in the prompt, "
            "or leave them out (--tool-key)"
        )
    for i, message in enumerate(messages):
        role = message["role"]
        content = joined_text(message.get("content"))
        if role not in _ROLES and role not in template:
            raise TemplateRefusal(
                f"message {i} has the role {role!r}, which the chat template does not know; roles "
                f"are {', '.join(_ROLES[:4])}"
            )
        calls = message.get("tool_calls") or ()
        # The template may write a text in another way (trimmed, as JSON), and the name of a call may
        # also be in a text: see whether they make a difference.
        unsure = [name for name in _names(calls) if text.count(name) <= contents.count(name)]
        if unsure:
            other = json.dumps(calls).replace(f'"{unsure[0]}"', '"another_name"')
            probes = [message, {**message, "tool_calls": json.loads(other)}]
        elif role == "assistant" or not content or content.strip() in text:
            continue
        else:
            probes = [{**message, "content": word} for word in ("one", "two")]
        one, two = (
            render_chat(
                renderer, [*messages[:i], probe, *messages[i + 1 :]], tools=tools, **options
            )
            for probe in probes
        )
        if one == two:
            what = f"the tool calls of message {i}" if unsure else f"message {i} (role {role!r})"
            raise TemplateRefusal(f"the chat template leaves out {what}")


def _names(functions: Iterable[object]) -> list[str]:
    """The names of tools, or of calls, which may be in an object of their own."""
    inner = [item.get("function", item) for item in functions if isinstance(item, Mapping)]
    names = [item.get("name") for item in inner if isinstance(item, Mapping)]
    return [name for name in names if isinstance(name, str)]


def render_chat(
    renderer: Tokenizer | ProcessorMixin, messages: Sequence[Mapping[str, Any]], **options: object
) -> str:
    """Render messages as text with the chat template of a tokenizer or processor.

    Data sets write messages in ways that not every template takes; they are rendered in the way of
    the template:

    * Most templates write the arguments of tool calls as JSON or go through their names, so they
      need objects. In many data sets arguments are JSON text, as in OpenAI's API, which such
      templates quote once more or refuse. Templates that add arguments to a text need text.
    * A content of text parts is joined to a text, unless the template takes only parts; then texts
      become parts.
    * A message with tool calls may have no content. Where a template refuses that or writes "None",
      it is empty.

    Args:
        options: Arguments of ``apply_chat_template``.

    Raises:
        TemplateRefusal: The template refuses the messages or fails on them.
        DataError: There is no template.
    """
    if getattr(renderer, "chat_template", "") is None:
        raise DataError(
            "--hf-checkpoint: its tokenizer has no chat template, which renders messages: add the file "
            "chat_template.jinja to the folder, or give texts, without --apply-chat-template"
        )
    messages = _with_content(messages, _takes_text(renderer))
    # A missing content is tried as it is, and replaced only if the template cannot take it.
    absent = [m for m in messages if m.get("content") is None]
    emptied = [m if m.get("content") is not None else {**m, "content": ""} for m in messages]
    try:
        text = _rendered(renderer, messages, options)
    except TemplateRefusal:
        if not absent:
            raise
        return _rendered(renderer, emptied, options)
    if absent and "None" in text:
        empty = _rendered(renderer, emptied, options)
        return empty if empty.count("None") < text.count("None") else text
    return text


def _rendered(
    renderer: Tokenizer | ProcessorMixin,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, object],
) -> str:
    apply: Callable[..., object] = renderer.apply_chat_template
    try:
        try:
            return str(apply(_with_arguments(messages, _as_object), tokenize=False, **options))
        except TypeError:
            if not any(message.get("tool_calls") for message in messages):
                raise
            return str(apply(_with_arguments(messages, _as_text), tokenize=False, **options))
    except Exception as error:  # A template is a program of the checkpoint and can fail in any way.
        reason = (str(error).splitlines() or [""])[0][:200]
        raise TemplateRefusal(
            f"the chat template refuses these messages: {reason or type(error).__name__}"
        ) from error


def joined_text(content: object) -> str | None:
    """The text of a content: itself, or its parts joined if all of them are texts. Otherwise
    None.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [
        part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        for part in content
    ]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else None


def _with_content(
    messages: Sequence[Mapping[str, Any]], takes_text: bool
) -> list[Mapping[str, Any]]:
    """Copy messages; a content of texts gets the form that the template takes."""
    made = list[Mapping[str, Any]]()
    for message in messages:
        content = message.get("content")
        text = joined_text(content)
        if takes_text and isinstance(content, list) and text is not None:
            message = {**message, "content": text}
        elif not takes_text and isinstance(content, str):
            message = {**message, "content": [{"type": "text", "text": content}]}
        made.append(message)
    return made


def _takes_text(renderer: Tokenizer | ProcessorMixin) -> bool:
    """Whether the template writes a content that is a text. Those of some models with images take
    only parts.
    """

    def shows(content: object) -> bool:
        with contextlib.suppress(TemplateRefusal):
            return _PROBE in _rendered(renderer, [{"role": "user", "content": content}], {})
        return False

    template = str(getattr(renderer, "chat_template", None))
    if template not in _template_takes_text:
        parts_only = not shows(_PROBE) and shows([{"type": "text", "text": _PROBE}])
        _template_takes_text[template] = not parts_only
    return _template_takes_text[template]


def _with_arguments(
    messages: Sequence[Mapping[str, Any]], convert: Callable[[object], object]
) -> list[dict[str, Any]]:
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


def end_ids(
    tokenizer: Tokenizer, checkpoint: str | None, named: Sequence[int] | None = None
) -> frozenset[int]:
    """Return the tokens that end what a model says: those of its checkpoint and its tokenizer, and
    special ones of ``named`` (``--rollout-stop-token-ids``)."""
    special = {
        token for token in named or () if not tokenizer.decode([token], skip_special_tokens=True)
    }
    return end_token_ids(checkpoint or "", tokenizer.eos_token_id) | special


@functools.cache
def load_cached(name: str, is_folder: bool, kwargs: LoadOptions) -> Tokenizer:
    """Load the tokenizer of a folder or a name, once per process for the same options."""
    if is_folder and not any((Path(name) / file).is_file() for file in _TOKENIZER_FILES):
        raise FileNotFoundError(
            f"{name} holds no tokenizer (none of {', '.join(_TOKENIZER_FILES)}): copy these files from "
            "the model of which it was made"
        )
    direct = (
        _direct_class(Path(name))
        if is_folder and dict(kwargs).keys() <= {"trust_remote_code"}
        else None
    )
    if direct is not None:
        tokenizer: Any = direct.from_pretrained(name)
        return tokenizer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, **dict(kwargs))
    return tokenizer


def _direct_class(folder: Path) -> Any | None:
    """The class that ``AutoTokenizer`` would choose for a folder, or None if only ``AutoTokenizer``
    knows it.
    """
    try:
        # The same two files from which AutoTokenizer decides.
        model = json.loads((folder / "config.json").read_bytes())
        tokenizer = json.loads((folder / "tokenizer_config.json").read_bytes())
        if (
            not (folder / "tokenizer.json").is_file()
            or "auto_map" in tokenizer
            or "auto_map" in model
        ):
            return None  # auto_map names code in the folder, which --trust-remote-code allows
        known = DIRECT_CLASSES.get(model["model_type"], {})
        path = known.get(tokenizer["tokenizer_class"].removesuffix("Fast"))
        module, name = path.split(":") if path else ("", "")
        return getattr(importlib.import_module(module), name) if module else None
    except (OSError, ValueError, LookupError, AttributeError, TypeError, ImportError):
        return None  # A file that is missing or not as expected: AutoTokenizer reports it.


@functools.cache
def _load_processor(name: str, is_folder: bool, kwargs: LoadOptions) -> Any | None:
    if is_folder and not any((Path(name) / file).is_file() for file in _PROCESSOR_FILES):
        return None
    from transformers import AutoProcessor, ProcessorMixin

    processor = AutoProcessor.from_pretrained(name, **dict(kwargs))
    # For a text model, it is the tokenizer.
    return processor if isinstance(processor, ProcessorMixin) else None


def _resolve(
    name_or_path: str | Path, trust: bool, kwargs: dict[str, object]
) -> tuple[str, bool, LoadOptions]:
    """(folder or hub id, whether it is a folder, the arguments to load it with)"""
    name = str(name_or_path or "")
    if not name:
        raise FileNotFoundError(
            "no checkpoint is given to load a tokenizer from: set --hf-checkpoint"
        )
    # Always said, since transformers asks in the terminal where it is not.
    options = tuple(sorted({**kwargs, "trust_remote_code": trust}.items()))
    # A folder first: a hub id may also be the name of a folder here.
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder), True, options
    if not looks_like_hub_id(name):
        raise FileNotFoundError(
            f"checkpoint folder {name} does not exist (looked for {folder.absolute()}), and the name "
            "is no hub id (owner/model)"
        )
    return name, False, options
