"""Prompts of a program, checked before they are sent to the engines of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.data.sample import Message

Prompt = str | list["Message"]
MOST_RESPONSES = 10_000
"""The most responses to one prompt in one call."""


def is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt: a text, or a list of messages."""
    return isinstance(prompts, str) or (isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], Mapping))


def check_prompts(prompts: Prompt | Iterable[Prompt], n: int, sampling: Mapping[str, object]) -> list[Prompt]:
    """Return the prompts as a list.

    Args:
        n: The number of responses to each.
        sampling: Sampling parameters of SGLang. Their names and ranges are checked by the engine.

    Raises:
        ValueError: With all problems at once, one on each line: a prompt is neither a text nor a list of messages, a
            text has half of a surrogate pair, ``n`` is not a number from 1 to :data:`MOST_RESPONSES`, or a parameter
            cannot be sent as JSON.
    """
    problems = []
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_RESPONSES:
        problems.append(f"n must be a whole number from 1 to {MOST_RESPONSES}, not {n!r:.60}")
    for name, value in sampling.items():
        try:
            _sendable(value)
        except (TypeError, ValueError, RecursionError) as error:
            problems.append(f"{name}={value!r:.60}: {error}")
    given: list[Any] = []
    if is_single(prompts):  # type: ignore[arg-type]
        given = [prompts]
    elif isinstance(prompts, Iterable) and not isinstance(prompts, Mapping | bytes):
        given = list(prompts)
    else:
        problems.append(f"prompts are a text, a list of messages, or a list of these, not a {type(prompts).__name__}")
    asked: list[Prompt] = []
    for place, prompt in enumerate(given):
        try:
            asked.append(_checked(prompt, str(place)))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return asked


def _checked(prompt: object, place: str) -> Prompt:
    from slime.data.prompts import check_messages

    found = prompt if isinstance(prompt, str) else check_messages(prompt, place)
    try:
        _sendable(found)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the prompt {place}: {error}") from error
    return found


def _sendable(value: object) -> None:
    from slime.data.rows import check_values

    json.dumps(value, allow_nan=False)
    check_values(value)
