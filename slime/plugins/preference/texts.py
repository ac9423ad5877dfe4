"""The text of a conversation, divided into prompt and answer as preferences are trained and scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime.data.tokenizers import render_chat
from slime.types import Tokenizer


def prompt_and_answer(
    tokenizer: Tokenizer,
    prompt: str | Sequence[Mapping[str, Any]],
    answer: str | Sequence[Mapping[str, Any]],
    **options: object,
) -> tuple[str, str]:
    """Return prompt and answer as texts.

    Messages are rendered with the chat template, and the answer is what it adds to the prompt,
    without white space after the end token, which no model samples. A text gets the end token of
    the tokenizer.

    Args:
        options: Arguments of the chat template.

    Raises:
        ValueError: The template changes the prompt when the answer follows, or one of the two is a
            text and the other has messages that it does not fit.
    """
    end = tokenizer.eos_token or ""
    if isinstance(prompt, str):
        if not isinstance(answer, str):
            raise ValueError("a prompt that is a text needs texts as responses")
        return prompt, answer + end
    turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    start = render_chat(tokenizer, prompt, add_generation_prompt=True, **options)
    whole = render_chat(tokenizer, [*prompt, *turns], **options)
    if not whole.startswith(start):
        raise ValueError(
            "the chat template renders the prompt otherwise when the answer follows, so the answer "
            "cannot be cut out"
        )
    text = whole.removeprefix(start)
    return start, text.rstrip() if end and text.rstrip().endswith(end) else text
