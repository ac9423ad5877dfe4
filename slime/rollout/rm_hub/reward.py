"""What a reward type is: the function that scores, and what else a run has to know about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime.data.sample import Sample
from slime.registry import find, parts

BOXED = "boxed_"
"""The prefix of a type that scores only the last boxed part of a response."""
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?!\s|\{\s*\})")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def label_as_text(label: object, sample: Sample) -> str | None:
    """The own answer of most rewards: the label as it is."""
    return str(label)


@dataclass(frozen=True)
class Reward:
    """A value of ``--rm-type``, as :func:`slime.registry.register` takes it.

    Attributes:
        score: ``fn(sample)`` or ``fn(args, sample)``, which may be async, returns the reward: a
            number or a dict; None if the verifier gave no result. ``sample.response`` has no end
            token.
        label_problem: Describes what is wrong with the label and the metadata of a row, or returns
            None. It is called for every row before a run starts, so it must be cheap.
        needs_label: Whether a sample without a label is an error.
        reads_reasoning: Whether a response is scored although it never leaves its reasoning.
        needs_reasoning: Whether an answer counts only after reasoning.
        own_answer: ``fn(label, sample)`` returns the response that has the label as its answer, for
            ``--dry-run``. None if the label is not an answer.
        boxed: With the prefix ``boxed_``, the text to score, from the boxed part and the whole
            response.
        check: Gets the arguments, as the section of them that it reads, and returns what keeps the
            reward from working with them on this machine.
    """

    score: Callable[..., Any]
    label_problem: Callable[[object, Mapping[str, object]], str | None] | None = None
    needs_label: bool = False
    reads_reasoning: bool = False
    needs_reasoning: bool = False
    own_answer: Callable[[object, Sample], str | None] | None = label_as_text
    boxed: Callable[[str, str], str] = lambda boxed, response: boxed
    check: Callable[[Any], list[str]] | None = None


def reward_of(name: str) -> Reward | None:
    """Return the reward type of this name, also with the prefix ``boxed_``; None if there is
    none.

    Raises:
        TypeError: A package has registered something else.
    """
    plain = name.removeprefix(BOXED)
    if plain not in parts("reward"):
        return None
    reward = find("reward", plain)
    if not isinstance(reward, Reward):
        raise TypeError(
            f"reward {plain!r}: register Reward(function), not a {type(reward).__name__}"
        )
    return reward


def check_label(
    rm_type: str, label: object, metadata: Mapping[str, object] | None = None
) -> str | None:
    """Describe what is wrong with a label for a reward type, or return None.

    The check is cheap: it starts no process and uses no symbolic parser.

    Args:
        rm_type: A value of ``--rm-type``, also with the prefix ``boxed_``. Unknown types pass, as
            do types that read no label.
        label: The label of the row.
        metadata: The metadata of the row. Its ``rm_type`` overrides the argument, as it does in the
            run.
    """
    metadata = metadata or {}
    name = str(metadata.get("rm_type") or rm_type or "").strip()
    reward = reward_of(name)
    if reward is None or reward.label_problem is None:
        return None
    problem = reward.label_problem(label, metadata)
    return None if problem is None else f"reward type {name.removeprefix(BOXED)}: {problem}"


def missing_label(label: object) -> str | None:
    """Say that a label is missing, or neither a text nor a number; None if it is one of these."""
    if label is None:
        return "the row has no label"
    if isinstance(label, (dict, list)):
        return f"the label is a {type(label).__name__}, not a text or number: {str(label)[:80]!r}"
    return "the label is empty" if not str(label).strip() else None


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last ``\boxed{...}`` or ``\fbox{...}``, or of ``\boxed x``; None
    if there is no box.

    The contents of a box that is not closed are empty, because an answer before it has been taken
    back. An empty box, as in "the answer in \boxed{}", is no box.
    """
    starts = list(_BOX.finditer(text))
    return _box_contents(text, starts[-1].end()) if starts else None


def _box_contents(text: str, start: int) -> str:
    if text[start : start + 1] != "{":
        return re.split(r"[\s$]", text[start : start + 200], maxsplit=1)[0]
    depth = 0
    for mark in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return text[start + 1 : mark.start()].strip()
    return ""
