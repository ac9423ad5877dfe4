"""Token ids and mask for conversations of which only the text is known."""

from __future__ import annotations

from typing import Any

from slime.data.sample import Sample
from slime.rollout.prompts import encode, render

Ids = list[int]


def conversation_ids(tokenizer: Any, sample: Sample, conversation: Any) -> tuple[Ids, Ids, list[int]]:
    """Prompt ids, response ids, and the response's mask.

    Args:
        sample: with its first prompt and its last response.
        conversation: the message list after the function worked on it. Turns that it appended to the
            prompt are part of the response: assistant turns are trained on, the rest is masked.

    Where the chat template does not render a conversation as a continuation of its beginning (some drop
    earlier reasoning), the turns count as prompt and only the last response is trained on.
    """
    first = sample.prompt if isinstance(sample.prompt, str) else render(tokenizer, sample, sample.prompt)
    turns = _turns(sample, conversation)
    if turns:
        parts = _parts(tokenizer, sample, turns, first)
        if parts is None:
            return encode(tokenizer, render(tokenizer, sample, [*sample.prompt, *turns])), *_trained(tokenizer, sample)
        ids, mask = [], []
        for text, trained in [*parts, (sample.response, 1)]:
            tokens = encode(tokenizer, text)
            ids += tokens
            mask += [trained] * len(tokens)
        return encode(tokenizer, first), ids, mask
    return encode(tokenizer, first), *_trained(tokenizer, sample)


def _trained(tokenizer: Any, sample: Sample) -> tuple[Ids, list[int]]:
    ids = encode(tokenizer, sample.response)
    return ids, [1] * len(ids)


def _turns(sample: Sample, conversation: Any) -> list[dict[str, Any]]:
    """Messages appended to the prompt, without the last response (and what came after it) where it was appended too."""
    if not isinstance(conversation, list) or not isinstance(sample.prompt, list):
        return []
    turns = list(conversation[len(sample.prompt) :])
    answers = [i for i, message in enumerate(turns) if message.get("role") == "assistant"]
    if answers and turns[answers[-1]].get("content") == sample.response:
        turns = turns[: answers[-1]]
    return turns


def _parts(tokenizer: Any, sample: Sample, turns: list[dict[str, Any]], first: str) -> list[tuple[str, int]] | None:
    """Pieces of text between first prompt and last response, each with its mask; None when they do not add up."""
    parts: list[tuple[str, int]] = []
    messages: list[Any] = list(sample.prompt)
    text = first
    for message in turns:
        messages.append(message)
        if message.get("role") == "assistant":
            before = render(tokenizer, sample, messages[:-1])
            after = render(tokenizer, sample, messages, generation_prompt=False)
            if not before.startswith(text) or not after.startswith(before):
                return None
            parts += [(before[len(text) :], 0), (after[len(before) :], 1)]
            text = after
    before = render(tokenizer, sample, messages)
    if not before.startswith(text):
        return None
    return [*parts, (before[len(text) :], 0)]
