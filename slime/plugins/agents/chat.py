"""Convert conversations to token ids with the chat template, also only the part between two turns
of the model.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime.data.plain_values import clean
from slime.data.tokenizers import TemplateRefusal, render_chat
from slime.plugins.http.server import BadRequest, Refused
from slime.rollout.prompts import encode
from slime.types import Tokenizer

from .messages import Message, Tool, call, fold_system, tool
from .tool_parsers import tools_in_words

if TYPE_CHECKING:
    from transformers import ProcessorMixin

# placeholder for the model's last answer when the text after it is rendered
_MARK = "slime.7c2e.turn"
_shown: dict[tuple[str, str], bool] = {}


class ChatTemplate:
    """The chat template of a tokenizer.

    If the template does not support tools, they are described in the system message in the form of
    the Hermes models, and earlier calls become part of the assistant's text.

    Args:
        kwargs: Template arguments, such as ``enable_thinking``.

    Raises:
        ValueError: The tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer, kwargs: Mapping[str, object]) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                "agents need a chat template, but the tokenizer of --hf-checkpoint has none"
            )
        self.tokenizer = tokenizer
        self.kwargs = kwargs
        self.knows_tools = shows_tools(tokenizer)

    def prompt(self, messages: list[Message], tools: list[Tool]) -> list[int]:
        """Return the token ids of a conversation up to the model's turn. If the last message is the
        assistant's, the model continues it."""
        return encode(self.tokenizer, self._render(messages, tools))

    def continuation(
        self, messages: list[Message], tools: list[Tool], known: int, last_id: int
    ) -> list[int] | None:
        """Return the token ids that follow the model's last answer in the conversation.

        Only the text after message ``known - 1``, the model's answer, is tokenized: the end of its
        turn and the messages from ``known`` on. The end token is left out if the model sampled it
        itself.

        Args:
            known: Number of messages whose ids are recorded; the last of them is the assistant's.
            last_id: The last id that the model sampled.

        Returns:
            The ids, or None if the template fails on the placeholder or does not render it.
        """
        marked: Message = {"role": "assistant", "content": _MARK}
        try:
            text = self._render([*messages[: known - 1], marked, *messages[known:]], tools)
        except Refused:
            return None
        _, found, after = text.partition(_MARK)
        if not found:
            return None
        ids = encode(self.tokenizer, after)
        closed = bool(ids) and ids[0] == last_id and last_id in self.tokenizer.all_special_ids
        return ids[1:] if closed else ids

    def _render(self, messages: list[Message], tools: list[Tool]) -> str:
        """Render the conversation as text. If the template rejects it, try again with the system
        messages folded into one.

        Raises:
            Refused: The template raised any error. Its input comes from clients, so it counts as
                their mistake.
        """
        if not self.knows_tools:
            messages = _in_words(messages, tools)
        if not _shows(self.tokenizer, "system"):
            messages = fold_system(messages)
        messages = results_as_shown(self.tokenizer, messages)
        try:
            return self._apply(messages, tools)
        except Exception as error:
            folded = fold_system(messages)
            if folded != messages:
                with contextlib.suppress(Exception):
                    return self._apply(folded, tools)
            raise BadRequest(
                f"the model's chat template rejected these messages: {error}"
            ) from error

    def _apply(self, messages: list[Message], tools: list[Tool]) -> str:
        prefilled = messages[-1]["role"] == "assistant"
        text = self.tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=not prefilled,
            continue_final_message=prefilled,
            **self.kwargs,
        )
        return clean(str(text))


def results_as_shown(
    renderer: Tokenizer | ProcessorMixin, messages: Sequence[Mapping[str, Any]]
) -> list[Any]:
    """Return messages whose tool results have a role that the chat template writes: ``tool``, or
    ``observation`` (GLM-4), or else ``user`` with the tags of the Hermes models.

    Templates of models without tools refuse other roles (Gemma) or leave them out without an error
    (Phi-4). The results of one turn, and a user's message after them, become one message.
    """
    if not any(message["role"] == "tool" for message in messages) or _shows(renderer, "tool"):
        return [*messages]
    role = "observation" if _shows(renderer, "observation") else "user"
    made: list[Any] = []
    after_result = False
    for message in messages:
        content = message["content"]
        is_result = message["role"] == "tool"
        if is_result and role == "user" and isinstance(content, str):
            content = f"<tool_response>\n{content}\n</tool_response>"
        changed = {**message, "role": role if is_result else message["role"], "content": content}
        joins = after_result and changed["role"] == "user" and isinstance(content, str)
        if joins and isinstance(made[-1]["content"], str):
            changed["content"] = f"{made.pop()['content']}\n{content}"
        made.append(changed)
        after_result = role == "user" and (is_result or joins)
    return made


def shows_tools(renderer: Tokenizer | ProcessorMixin) -> bool:
    """Whether the chat template describes the tools that it gets. Some have the word, but look for
    tools in the messages (Phi-4-mini)."""
    template = str(getattr(renderer, "chat_template", None))
    key = template, "tools"
    if key not in _shown:
        asked = [{"role": "user", "content": "-"}]
        _shown[key] = "tools" in template
        with contextlib.suppress(TemplateRefusal):
            _shown[key] &= _MARK in render_chat(renderer, asked, tools=[tool({"name": _MARK})])
    return _shown[key]


def _shows(renderer: Tokenizer | ProcessorMixin, role: str) -> bool:
    """Whether the chat template writes a message of this role where it stands, after a turn of the
    model: some leave out what they do not know, and some move system messages to the beginning.
    """
    key = str(getattr(renderer, "chat_template", None)), role
    if key not in _shown:
        asked = {"role": "user", "content": "slime.question"}
        said = {"role": "assistant", "content": "-"}
        shown = {"role": role, "content": _MARK, "tool_call_id": "000000000"}
        texts = []
        for turn in (said, {**said, "content": "", "tool_calls": [call("f", {}, "000000000")]}):
            with contextlib.suppress(TemplateRefusal):
                texts.append(render_chat(renderer, [asked, turn, shown]))
        _shown[key] = any(text.find(_MARK) > text.find("slime.question") for text in texts)
    return _shown[key]


def _in_words(messages: list[Message], tools: list[Tool]) -> list[Message]:
    """Describe the tools in the system message and write earlier calls as text, for templates that
    support neither.
    """
    plain: list[Message] = []
    for message in messages:
        calls = "".join(
            f"\n<tool_call>\n{json.dumps(c['function'])}\n</tool_call>"
            for c in message.get("tool_calls", [])
        )
        plain.append(
            {"role": message["role"], "content": (message["content"] + calls).lstrip("\n")}
        )
    if not tools:
        return plain
    preamble = tools_in_words(tools)
    if plain[0]["role"] == "system":
        first: Message = {"role": "system", "content": f"{plain[0]['content']}\n\n{preamble}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": preamble}, *plain]
