"""Reward ``gpqa``: 1.0 for the correct letter of a multiple-choice question, else 0.0.

The reward reads these keys of the metadata: ``choices`` (a list, or a dict from letter to text), ``valid_letters``,
``correct_letter``, ``correct_answer`` and ``answer_text`` (the text of the correct choice). The label may be the
letter, the text of the correct choice, or its index in ``choices``.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence

from slime.data.sample import Sample
from slime.rollout.rm_hub.f1 import normalize_answer
from slime.rollout.rm_hub.text import after_thinking, last_boxed

_TAIL = 4000  # characters at the end of a response in which the choice is searched


def gpqa_reward(sample: Sample) -> float:
    """Score one sample. A response that names no letter is compared with the text of the correct choice.

    Raises:
        ValueError: Neither label nor metadata give the correct letter.
    """
    letters = valid_letters(sample.metadata)
    correct = correct_letter(sample.label, sample.metadata, letters)
    if correct is None:
        raise ValueError(f"reward type gpqa: {unreadable(sample.label, sample.metadata)} (sample {sample.index})")
    response = after_thinking(sample.response)
    letter = extract_letter(response, letters)
    if letter is not None:
        return float(letter == correct)
    text = _correct_text(sample.label, sample.metadata, correct)
    said = normalize_answer(last_boxed(response) or response.strip().split("\n")[-1])
    return float(text is not None and said == normalize_answer(text))


def extract_letter(response: str, letters: str) -> str | None:
    """Return the letter that a response chooses, or None.

    The first of these that is found decides: a boxed letter, a letter after "answer", "choice" or "option", a letter on
    a line of its own, a letter before a closing parenthesis, the only separate letter in the last 100 characters.
    """
    one = f"[{letters}]"
    boxed = last_boxed(response)
    # The patterns below would take quadratic time on long runs of white space.
    response = re.sub(r"[^\S\n]+", " ", re.sub(r"\s*\n\s*", "\n", response[-_TAIL:]))
    if boxed is not None:
        found = re.fullmatch(rf"\(?(?:\\text\s*\{{)?\s*\(?({one})\)?[.)]?\s*\}}?.*", boxed.strip(), re.DOTALL)
        # A box that begins with two letters contains a word: the A of "Answer" is not a choice.
        if found and not re.match(r"[A-Za-z]{2}", boxed.strip()):
            return found[1]
    for pattern in (
        rf"(?i:answer|choice|option)\s*(?i:is|:|=)*\s*[:=]?\s*\**\s*\(?({one})\)?(?![A-Za-z'])",
        rf"^\s*\**\(?({one})\)?[.):]?\**\s*$",
        rf"(?<![A-Za-z'])\(?({one})\)(?![A-Za-z])",
    ):
        matches = re.findall(pattern, response, re.MULTILINE)
        if matches:
            return matches[-1]
    alone = re.findall(rf"(?<![A-Za-z'])({one})(?![A-Za-z'])", response[-100:])
    return alone[-1] if len(set(alone)) == 1 else None


def valid_letters(metadata: Mapping[str, object]) -> str:
    """Return the letters that may be chosen: those of the metadata, else one per choice, else A to D."""
    given, choices = metadata.get("valid_letters"), metadata.get("choices")
    if isinstance(given, str | Sequence) and given:
        return "".join(str(letter).upper() for letter in given)
    if isinstance(choices, Mapping):
        return "".join(str(letter).upper() for letter in choices)
    return string.ascii_uppercase[: len(choices)] if isinstance(choices, Sequence) and choices else "ABCD"


def correct_letter(label: object, metadata: Mapping[str, object], letters: str) -> str | None:
    """Return the correct letter: ``correct_letter``, else by a label that is a letter, an index or a choice's text."""
    for value in (metadata.get("correct_letter"), label):
        if (
            isinstance(value, str)
            and len(value.strip().strip("()")) == 1
            and value.strip().strip("()").upper() in letters
        ):
            return value.strip().strip("()").upper()
    if isinstance(label, int | str) and str(label).isdigit() and int(label) < len(letters):
        return letters[int(label)]
    text = metadata.get("correct_answer") or metadata.get("answer_text") or label
    for letter, choice in _choice_texts(metadata, letters).items():
        if isinstance(text, str) and normalize_answer(str(choice)) == normalize_answer(text):
            return letter
    return None


def unreadable(label: object, metadata: Mapping[str, object]) -> str:
    """Explain why the correct letter is unknown."""
    keys = ", ".join(sorted(metadata)) or "none"
    return (
        f"label {label!r} is neither one of the letters {valid_letters(metadata)} nor one of the choices, "
        f"and metadata has no usable correct_letter, correct_answer or answer_text (its keys: {keys})"
    )


def _choice_texts(metadata: Mapping[str, object], letters: str) -> dict[str, object]:
    choices = metadata.get("choices")
    if isinstance(choices, Mapping):
        return {str(letter).upper(): text for letter, text in choices.items()}
    return dict(zip(letters, choices, strict=False)) if isinstance(choices, Sequence) else {}


def _correct_text(label: object, metadata: Mapping[str, object], letter: str) -> str | None:
    text = metadata.get("correct_answer") or metadata.get("answer_text")
    text = text or _choice_texts(metadata, valid_letters(metadata)).get(letter)
    return str(text) if text else (label if isinstance(label, str) and len(label) > 1 else None)
