"""What is known about reasoning: the tags of each model, whether a prompt has opened it, and the
answer after it.

Rewards, environments, loss masks and agents all read it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slime.types import Tokenizer


class Tags(NamedTuple):
    """The tags that enclose a model's reasoning."""

    start: str
    end: str


THINK = Tags("<think>", "</think>")
_THINKERS = (
    "deepseek-r1", "deepseek-v3", "glm45", "interns1", "kimi_k2", "minimax", "qwen3", "qwen3-thinking", "step3",
    "step3p5",
)  # fmt: skip
TAGS: dict[str, Tags] = {
    **dict.fromkeys(_THINKERS, THINK),
    "kimi": Tags("◁think▷", "◁/think▷"),
    "mistral": Tags("[THINK]", "[/THINK]"),
    "seed-oss": Tags("<seed:think>", "</seed:think>"),
}
ALL_TAGS = tuple(dict.fromkeys(TAGS.values()))
_OPENING_TOKENS = 16  # more tokens than a start tag and the white space after it have


def opened_by(prompt: str, among: Iterable[Tags] = ALL_TAGS) -> Tags | None:
    """Return the tags whose start ends ``prompt``, as the generation prompt of some chat templates
    does, or None.
    """
    end = prompt.rstrip()
    return next((tags for tags in among if end.endswith(tags.start)), None)


def opened_by_ids(
    tokenizer: Tokenizer, ids: Sequence[int], among: Iterable[Tags] = ALL_TAGS
) -> Tags | None:
    """Return the tags that the tokens before a response have opened, as :func:`opened_by`."""
    return opened_by(tokenizer.decode(list(ids[-_OPENING_TOKENS:])), among)


def after_thinking(text: str | None, opened: Tags | None = None) -> str:
    """Return the answer in ``text``: what follows the last reasoning. It is empty while the model
    still reasons.

    Args:
        opened: The tags that the prompt before ``text`` has opened, so that ``text`` begins within
            the reasoning.
    """
    text = text or ""
    # After the last end tag of any model, since a checkpoint may have been trained with another
    # model's tags.
    begin = max(
        (at + len(tags.end) for tags in ALL_TAGS if (at := text.rfind(tags.end)) >= 0), default=0
    )
    answer = text[begin:]
    reasons = any(tags.start in answer for tags in ALL_TAGS) or (
        opened is not None and opened.end not in text
    )
    return "" if reasons else answer


def answer_after_reasoning(text: str | None) -> str | None:
    """Return what follows the reasoning or ``###Response``; None if the text has neither."""
    text = text or ""
    answer = after_thinking(text)
    if answer != text:
        return answer
    _, found, rest = text.rpartition("###Response")
    return rest if found else None
