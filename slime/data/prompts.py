"""Parses a row of a data set into prompt, label, metadata and tools. It needs no tokenizer and no
model, so the checks before the start of a run use it as well."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.config.files import lookup
from slime.data.media import MultimodalTypes
from slime.data.plain_values import decoded, metadata_of, parse_json
from slime.data.rows import Problems, RawRow
from slime.data.sample import Message
from slime.types import JsonValue

_MISSING = object()
_OPTIONAL = ("label", "metadata", "tools")  # the columns with these names may be absent


@dataclass(frozen=True)
class RowKeys:
    """The columns of prompt, label and so on. A dotted key (``reward_model.ground_truth``) reaches
    into an object.
    """

    prompt: str = "prompt"
    label: str | None = "label"
    metadata: str | None = "metadata"
    tools: str | None = "tools"
    multimodal: Mapping[str, str] = field(default_factory=dict)  # media type → column


@dataclass
class PromptRow:
    """A parsed row. Messages hold their media as parts ``{"type": "image", "image": ...}``."""

    where: str
    prompt: str | list[Message]
    label: JsonValue
    metadata: dict[str, Any]
    tools: list[dict[str, Any]] | None


class MissingColumn(ValueError):
    """A row lacks a required column. Like those of all problems of a row, the message does not
    contain the row's position.
    """


class Report:
    """The problems of a file's rows, collected part by part in the order of the rows, also by
    several processes.
    """

    def __init__(self, keys: RowKeys) -> None:
        self.keys = keys
        self.rows = 0
        self.names = ""  # columns of the first row
        self.absent = _asked(keys)  # the expected columns that no row has had so far
        self.wrong = Problems()
        self.apart_from_columns = Problems()  # those of rows that do not just lack a column
        self.json_prompts = 0  # number of prompts that were messages as JSON text

    def add(self, where: str, error: ValueError) -> None:
        self.wrong.add(f"{where}: {error}")
        if not isinstance(error, MissingColumn):
            self.apart_from_columns.add(f"{where}: {error}")

    def saw(self, data: Mapping[str, object]) -> None:
        self.names = self.names or _names(data)
        self.absent = {x for x in self.absent if lookup(data, x[1], _MISSING) is _MISSING}

    def merge(self, later: Report) -> None:
        """Add the report on the following rows to this one."""
        self.rows += later.rows
        self.json_prompts += later.json_prompts
        self.names = self.names or later.names
        self.absent &= later.absent
        self.wrong.extend(later.wrong)
        self.apart_from_columns.extend(later.apart_from_columns)

    def tell(self, spec: str, problems: Problems) -> None:
        """Add the collected problems to ``problems``.

        A column that no row has is reported once. It is a problem for prompt and label, but only a
        warning for others, since an evaluation set need not have all columns of the training data.
        """
        if not self.rows:
            problems.add(f"{spec}: no rows")
        if self.json_prompts:
            problems.notices.append(
                f"{spec}: {self.json_prompts} prompts are JSON text, which is read as messages"
            )
        if "'image" in self.names and not self.keys.multimodal:
            problems.notices.append(f"{spec}: images are not read without --multimodal-keys")
        # A column that is missing in every row is one mistake of a flag, not one for each row.
        absent = sorted(self.absent) if self.names else []
        for name, key in absent:
            said = f"{spec}: no row has the {name} column {key!r}; the rows have {self.names}"
            if name in ("prompt", "label"):
                flag = "--input-key" if name == "prompt" else "--label-key"
                problems.add(f"{said}: name it with {flag}")
            else:
                problems.warnings.append(said)
        said_once = any(name in ("prompt", "label") for name, _ in absent)
        problems.extend(self.apart_from_columns if said_once else self.wrong)


def parse_rows(
    raws: Sequence[RawRow], keys: RowKeys, as_messages: bool = False, json_messages: bool = False
) -> tuple[list[PromptRow], Report]:
    """Parse rows; returns those that are valid, and a report on the others.

    Args:
        as_messages: Convert a prompt that is a string to one user message (for the chat template,
            or for media).
        json_messages: Read a prompt that is the JSON text of messages as these messages.
    """
    report = Report(keys)
    prompts = []
    as_messages |= bool(keys.multimodal)
    for raw in raws:
        report.rows += 1
        try:
            data = raw.decode()
            report.saw(data)
            messages = _json_messages(lookup(data, keys.prompt)) if json_messages else None
            report.json_prompts += messages is not None
            prompts.append(_parse_row(raw, data, keys, as_messages, messages))
        except ValueError as error:
            report.add(raw.where, error)
    return prompts, report


def _json_messages(value: object) -> list[Any] | None:
    """The messages whose JSON text a prompt is, or None if it is another text."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return None
    try:
        parsed = parse_json(value)
    except ValueError:
        return None
    return parsed if _are_objects(parsed) and any("role" in entry for entry in parsed) else None


def _parse_row(
    raw: RawRow,
    data: Mapping[str, object],
    keys: RowKeys,
    as_messages: bool,
    messages: Sequence[Message] | None,
) -> PromptRow:
    """Parse one row, whose content is ``data``.

    Args:
        as_messages: See :func:`parse_rows`.
        messages: Used in place of the value of the prompt column.

    Raises:
        ValueError: The row is not valid.
    """
    # Each part raises its own error; the first one is told, since the others often follow from it.
    prompt = _prompt(data, keys, as_messages, messages)
    metadata = dict(metadata_of(_optional(data, keys.metadata)))
    tools = decoded("tools", _optional(data, keys.tools))
    if tools is not None and not _are_objects(tools):
        raise ValueError(
            f"tools must be a list of objects (or its JSON text), not {_describe(tools)}"
        )
    if raw.filled:
        tools = _unfilled(tools)
        for message in prompt if isinstance(prompt, list) else ():
            if "tool_calls" in message:
                message["tool_calls"] = _unfilled(message["tool_calls"])
    if tools:
        metadata["tools"] = tools
    return PromptRow(raw.where, prompt, _label(data, keys.label), metadata, tools or None)


def _asked(keys: RowKeys) -> set[tuple[str, str]]:
    """The columns that some row should have, by name. Optional columns with their default names may
    be absent.
    """
    named = {(name, key) for name in _OPTIONAL if (key := getattr(keys, name)) not in (None, name)}
    return {("prompt", keys.prompt), *keys.multimodal.items(), *named}


def _optional(data: Mapping[str, object], key: str | None) -> Any:
    return None if key is None else lookup(data, key)


def _names(data: Mapping[str, object]) -> str:
    # with the keys of objects, which a dotted key names (verl's reward_model.ground_truth)
    names = [
        f"{name}.{inner}".rstrip(".")
        for name, value in data.items()
        for inner in (value if isinstance(value, Mapping) else [""])
    ]
    return f"{', '.join(map(repr, names)):.500}" or "no columns at all"


def _prompt(
    data: Mapping[str, object], keys: RowKeys, as_messages: bool, messages: Sequence[Message] | None
) -> str | list[Message]:
    # Three forms: JSON text that was parsed before, a plain text, a list of messages.
    value = messages or lookup(data, keys.prompt, _MISSING)
    if value is _MISSING:
        raise MissingColumn(f"no prompt column {keys.prompt!r}; the row has {_names(data)}")
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"the prompt {keys.prompt!r} is empty")
        if not as_messages:
            return value
        value = [{"role": "user", "content": value}]
    checked = check_messages(value, repr(keys.prompt))
    return _insert_media(checked, data, keys.multimodal) if keys.multimodal else checked


def check_messages(value: object, where: str) -> list[Message]:
    """Check that a prompt is a list of messages, and return it without the fields that are None.

    Args:
        where: Names the prompt in an error.

    Raises:
        ValueError: It is not a list, or a message has no role or no content.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"the prompt {where} must be a text or a list of messages, not {_describe(value)}"
        )
    if isinstance(value[0], int):
        raise ValueError(f"the prompt {where} is a list of numbers: give the text of token ids")
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"message {i} of {where} must be an object with a role, not {_describe(message)}"
            )
        content = message.get("content")
        if not isinstance(content, str | list) and not (
            content is None and message.get("tool_calls")
        ):
            raise ValueError(
                f"message {i} of {where} has a content that is {_describe(content)}, not a text "
                "or parts"
            )
        if isinstance(content, list):
            content = [_present(part) if isinstance(part, Mapping) else part for part in content]
        messages.append(_present(message) | ({"content": content} if "content" in message else {}))
    return messages


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """In Parquet, every message and part of a message has every field; those that it does not use
    are None.
    """
    return {name: value for name, value in fields.items() if value is not None}


def _unfilled(value: object) -> Any:
    """The same for all objects in a value: schemas and arguments of different tools have the fields
    of all of them.
    """
    if isinstance(value, list):
        return [_unfilled(entry) for entry in value]
    return (
        {name: _unfilled(entry) for name, entry in _present(value).items()}
        if isinstance(value, dict)
        else value
    )


def _describe(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _insert_media(
    messages: list[Message], data: Mapping[str, object], columns: Mapping[str, str]
) -> list[Message]:
    """Put the items of the media columns where messages have placeholders: ``<image>`` in a text,
    or a part ``{"type": "image"}`` without an image."""
    # The n-th placeholder of a kind gets the n-th item of its column, over all messages.
    kinds = {MultimodalTypes.get(name).placeholder: name for name in columns}
    placeholder = re.compile(f"({'|'.join(map(re.escape, kinds))})")
    items = {name: _media_items(data, column) for name, column in columns.items()}
    used = dict.fromkeys(columns, 0)

    def next_item(name: str) -> list[Message]:
        # even without an item, so that the error below tells the number of placeholders
        used[name] += 1
        if used[name] > len(items[name]):
            return []
        item = items[name][used[name] - 1]
        # A dict with a type is already a part of a message.
        return [item if isinstance(item, dict) and "type" in item else {"type": name, name: item}]

    def split(text: str) -> list[Message]:
        parts: list[Message] = []
        for piece in placeholder.split(text):
            if piece in kinds:
                parts += next_item(kinds[piece])
            elif piece:
                parts.append({"type": "text", "text": piece})
        return parts

    def marked(text: object) -> bool:
        return isinstance(text, str) and placeholder.search(text) is not None

    def filled(part: object) -> list[Any]:
        if not isinstance(part, Mapping):
            return [part]
        if marked(part.get("text")):
            return split(part["text"])
        name = part.get("type")
        return next_item(name) if name in used and part.get(name) is None else [part]

    result = []
    for message in messages:
        content: Any = message.get("content")
        if isinstance(content, list):
            message = message | {"content": [made for part in content for made in filled(part)]}
        elif marked(content):
            message = message | {"content": split(content)}
        result.append(message)
    for name, column in columns.items():
        if used[name] != len(items[name]):
            raise ValueError(
                f"{used[name]} placeholders {MultimodalTypes.get(name).placeholder} in the prompt, "
                f"but {len(items[name])} items in {column!r}"
            )
    return result


def _media_items(data: Mapping[str, object], column: str) -> list[Any]:
    value = _optional(data, column)
    return value if isinstance(value, list) else [] if value is None else [value]


def _label(data: Mapping[str, object], key: str | None) -> JsonValue:
    """Convert scalars to text; lists and objects are kept, for custom reward functions."""
    value = None if key is None else lookup(data, key, _MISSING)
    if value is _MISSING and key != "label":
        raise MissingColumn(f"no label column {key!r}; the row has {_names(data)}")
    if value is _MISSING or value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bytes):
        raise ValueError(f"the label is bytes: {_describe(value)}")
    return value if isinstance(value, str | list | dict) else str(value)


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)
