"""What a client demands of an answer (tool_choice, response_format), and whether it meets that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.data.plain_values import parse_json
from slime.plugins.http.server import (
    BadRequest,
    json_object,
    list_of,
    need,
    one_of,
    refuse,
    string,
    take,
)
from slime.types import JsonObject, JsonValue

from .messages import Tool

if TYPE_CHECKING:
    from jsonschema.protocols import Validator


Schema = JsonObject | bool
ANY_OBJECT: Schema = {"type": "object"}
UNMET = "answer_not_as_required"
"""Error code for an answer that does not satisfy the client's demand."""


@dataclass(frozen=True)
class Demand:
    """The requirements for an answer.

    Attributes:
        calls: Whether the answer must call at least one tool.
        names: The tools that it may call; None allows all tools of the request.
        schema: JSON schema of its text if it calls no tool; None allows any text.
    """

    calls: bool = False
    names: tuple[str, ...] | None = None
    schema: Schema | None = None

    def unmet(self, content: str, called: list[str]) -> str | None:
        """Explain why an answer does not satisfy the demand; None if it does.

        Args:
            content: The text of the answer, without tool calls.
            called: The names of the tools that it calls.
        """
        if self.calls and not called:
            return "tool_choice requires a tool call, but the answer has none that could be parsed"
        others = [name for name in called if self.names is not None and name not in self.names]
        if others:
            allowed = ", ".join(self.names or ())
            return f"the model called {', '.join(others)}, but tool_choice allows only {allowed}"
        if self.schema is None or called:
            return None
        try:
            value = parse_json(content.strip())
        except ValueError as error:
            return f"response_format requires JSON, but the text of the answer is not JSON: {error}"
        return _violation(self.schema, value)


def demand_of(
    wanted: tuple[bool, tuple[str, ...] | None], schema: Schema | None, tools: Sequence[Tool]
) -> Demand | None:
    """Return the demand of a request; None if it has no requirements.

    Args:
        wanted: The result of :func:`openai_choice` or :func:`anthropic_choice`.
        schema: The result of :func:`schema_of`.
        tools: The tools in the model's prompt.

    Raises:
        Refused: No answer can satisfy the demand.
    """
    calls, names = wanted
    known = [entry["function"]["name"] for entry in tools]
    for name in names or ():
        if name not in known:
            raise BadRequest(
                f"tool_choice names {name!r}, but the request has no function tool of this name"
            )
    if calls and not known:
        raise BadRequest("tool_choice requires a tool call, but the request has no function tools")
    return (
        Demand(calls, names, schema) if calls or names is not None or schema is not None else None
    )


def openai_choice(choice: JsonValue) -> tuple[bool, tuple[str, ...] | None]:
    """Return whether ``tool_choice`` of Chat Completions or Responses requires a call, and the
    names that it allows (None for all)."""
    if choice in (None, "auto", "none"):
        return False, None
    if choice == "required":
        return True, None
    if isinstance(choice, dict) and choice.get("type") == "function":
        return True, (_name(choice),)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        inner = take(choice, "allowed_tools", json_object, choice, "tool_choice.")
        where = "tool_choice.allowed_tools."
        mode = need(inner, "mode", one_of("auto", "required"), where)
        allowed = need(inner, "tools", list_of(json_object), where)
        return mode == "required", tuple(_name(entry) for entry in allowed)
    raise refuse("tool_choice", "must be none, auto, required, a function or allowed_tools", choice)


def anthropic_choice(choice: JsonObject) -> tuple[bool, tuple[str, ...] | None]:
    """Return the same as :func:`openai_choice` for ``tool_choice`` of Anthropic's Messages API."""
    kind = choice.get("type")
    if not choice or kind in ("auto", "none"):
        return False, None
    if kind == "any":
        return True, None
    if kind == "tool":
        return True, (_name(choice),)
    raise refuse("tool_choice.type", "must be auto, any, tool or none", kind)


def schema_of(form: JsonObject | None, where: str) -> Schema | None:
    """Return the JSON schema that ``response_format`` or an equivalent field requires; None if any
    text is allowed.

    Args:
        where: The name of the field for error messages.

    Raises:
        BadRequest: The type is unknown, or the schema is invalid.
    """
    if form is None or form.get("type") == "text":
        return None
    kind = form.get("type")
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise refuse(f"{where}.type", "must be text, json_object or json_schema", kind)
    inner = take(form, "json_schema", json_object, form, f"{where}.")
    schema = inner.get("schema")
    if not isinstance(schema, dict | bool):
        raise BadRequest(f"{where}: json_schema must have a schema, which is an object")
    _check(schema, where)
    return schema


def _name(entry: JsonObject) -> str:
    function = take(entry, "function", json_object, entry, "tool_choice.")
    return need(function, "name", string(), "tool_choice.")


def _check(schema: Schema, where: str) -> None:
    from jsonschema.exceptions import SchemaError

    try:
        _validator(schema).check_schema(schema)
    except (SchemaError, RecursionError) as error:
        reason = error.message if isinstance(error, SchemaError) else "nested too deeply"
        raise BadRequest(f"{where}: the JSON schema is invalid: {reason}"[:500]) from error


def _validator(schema: Schema) -> type[Validator]:
    """Return the validator class for the ``$schema`` of a schema; the default is draft 2020-12."""
    from jsonschema.validators import Draft202012Validator, validator_for

    return validator_for(schema, default=Draft202012Validator)


def _violation(schema: Schema, value: JsonValue) -> str | None:
    """Describe where a value violates its schema; None if it is valid.

    Raises:
        Refused: The schema cannot be used, for example because it refers to a URL, which is never
            fetched.
    """
    from jsonschema.exceptions import best_match
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        error = best_match(_validator(schema)(schema, registry=Registry()).iter_errors(value))
    except (Unresolvable, RecursionError) as unusable:
        raise BadRequest(
            f"the JSON schema of response_format cannot be used: {unusable}"[:500]
        ) from unusable
    if error is None:
        return None
    return (
        f"response_format: the answer violates the JSON schema at {error.json_path}: "
        f"{error.message}"
    )[:500]
