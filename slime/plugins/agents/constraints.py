"""Convert demands of clients to structural tags, with which SGLang (XGrammar) constrains sampling.

A structural tag describes the text of the whole answer: optional reasoning if the model has tags for it, followed by
tool calls in the form of the model's family or by JSON. The forms are those of
:mod:`slime.plugins.agents.tool_formats`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from slime.data.reasoning import Tags
from slime.plugins.agents.demands import Demand, Schema
from slime.plugins.agents.fields import Reply
from slime.plugins.agents.messages import Tool
from slime.plugins.agents.tool_formats import FORMATS


class _Form(NamedTuple):
    """The form in which a model family writes calls. ``%s`` in ``begin`` is the tool's name, as a JSON string if
    ``quoted``."""

    begin: str
    end: str
    quoted: bool = False
    style: str = "json"
    before: str = ""  # text before the first call
    after: str = ""  # text after the last call
    between: str = ""  # text between two calls
    middle: Reply | None = None  # a part between ``begin`` and the arguments


_HERMES = _Form('<tool_call>\n{"name": %s, "arguments": ', "}\n</tool_call>", quoted=True, between="\n")
_CODER = _Form("<tool_call>\n<function=%s>\n", "\n</function>\n</tool_call>", style="qwen_xml", between="\n")
_GLM = _Form("<tool_call>%s", "</tool_call>", style="glm_xml")
_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_KIMI_ID: Reply = {
    "type": "sequence",
    "elements": [
        {"type": "regex", "pattern": "[0-9]{1,3}"},
        {"type": "const_string", "value": "<|tool_call_argument_begin|>"},
    ],
}
_FORMS = {
    **dict.fromkeys(("hermes", "qwen", "qwen25"), _HERMES),
    **dict.fromkeys(("qwen3_coder", "step3p5"), _CODER),
    **dict.fromkeys(("glm", "glm45", "glm47"), _GLM),
    "deepseekv3": _Form(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n", "\n```<｜tool▁call▁end｜>",
        before=_SECTION[0], after=_SECTION[1], between="\n",
    ),
    "deepseekv31": _Form(
        "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>", "<｜tool▁call▁end｜>", before=_SECTION[0], after=_SECTION[1]
    ),
    "kimi_k2": _Form(
        "<|tool_call_begin|>functions.%s:", "<|tool_call_end|>", middle=_KIMI_ID,
        before="<|tool_calls_section_begin|>", after="<|tool_calls_section_end|>",
    ),
    "llama3": _Form('{"name": %s, "parameters": ', "}", quoted=True, between=";"),
}  # fmt: skip


def structural_tag(demand: Demand, parser: str, tools: Sequence[Tool], tags: Tags | None, opened: bool) -> Reply | None:
    """Return the structural tag for answers that satisfy ``demand``; None if this module has no grammar for the form
    of the model's calls.

    Args:
        parser: Name of the form in which the model writes tool calls.
        tags: Tags of the model's reasoning, which may precede the answer.
        opened: Whether the prompt ends with the start tag of the reasoning.
    """
    form = _FORMS.get(parser)
    if tools and form is None:
        return None
    options: list[Reply] = []
    callable_tools = [t for t in tools if demand.names is None or t["function"]["name"] in demand.names]
    if form is not None and callable_tools:
        options.append(_calls(form, callable_tools))
    if not demand.calls:
        free: Reply = {"type": "any_text", "excludes": list(FORMATS[parser].marks) if tools else []}
        options.append(_json(demand.schema) if demand.schema is not None else free)
    answer: Reply = options[0] if len(options) == 1 else {"type": "or", "elements": options}
    return {"type": "structural_tag", "format": _sequence([*_reasoning(tags, opened), answer])}


def _calls(form: _Form, tools: Sequence[Tool]) -> Reply:
    """Describe one or more calls and nothing else."""
    calls: list[Reply] = []
    for tool in tools:
        name, parameters = tool["function"]["name"], _json(tool["function"]["parameters"], form.style)
        begin = form.begin.replace("%s", json.dumps(name) if form.quoted else name)
        content = parameters if form.middle is None else _sequence([form.middle, parameters])
        calls.append({"type": "tag", "begin": begin, "content": content, "end": form.end})
    some: Reply = {"type": "tags_with_separator", "tags": calls, "separator": form.between, "at_least_one": True}
    return some if not form.before else {"type": "tag", "begin": form.before, "content": some, "end": form.after}


def _reasoning(tags: Tags | None, opened: bool) -> list[Reply]:
    """Describe the text before the answer: the rest of the reasoning if the prompt has begun it, otherwise optional
    reasoning."""
    if tags is None:
        return []
    begin = "" if opened else tags.start
    block: Reply = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": tags.end}
    thought = _sequence([block, {"type": "regex", "pattern": "[ \\n]{0,4}"}])
    if opened:
        return [thought]
    return [{"type": "or", "elements": [thought, {"type": "const_string", "value": ""}]}]


def _json(schema: Schema, style: str = "json") -> Reply:
    return {"type": "json_schema", "json_schema": schema, **({"style": style} if style != "json" else {})}


def _sequence(elements: list[Reply]) -> Reply:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}
