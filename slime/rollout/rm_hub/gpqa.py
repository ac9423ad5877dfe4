"""Reward ``gpqa``: 1.0 for the correct choice of a multiple-choice question, else 0.0.

The reward reads these keys of the metadata: ``choices`` (a list, or a dict from letter to text), ``valid_letters``
(default: one per choice, or A to J), ``correct_letter``, ``correct_answer`` and ``answer_text`` (the text of the
correct choice). The label may be the letter, the text of the correct choice, or its index in ``choices``. Without
choices, a label that is no letter is compared with the response as text.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence

from slime.data.sample import Sample
from slime.rollout.rm_hub.f1 import normalize_answer
from slime.rollout.rm_hub.outcome import mark_unscored
from slime.rollout.rm_hub.text import after_thinking, last_boxed

_LETTERS = string.ascii_uppercase[:10]
_MINUS = re.compile(r"(?<![\w.)])[-−](?=[\d.])")
_BETWEEN = re.compile(r"(?<=[\w)])([./^])(?=[({]*(?:minus)?\d)")
_STYLES = r"(?:\\(?:text|math)(?:bf|rm|it|sf|tt)?\s*\{\s*)*"
_TAIL = 4000  # characters at the end of a response in which the choice is searched


def gpqa_reward(sample: Sample) -> float | None:
    """Score one sample. If label and metadata do not tell what is correct, the sample is marked as unscored."""
    reward = compute_gpqa_reward(sample.response, sample.label, sample.metadata)
    if reward is None:
        mark_unscored(sample, "error", unreadable(sample.label, sample.metadata))
    return reward


def compute_gpqa_reward(response: str, label: object, metadata: Mapping[str, object] | None = None) -> float | None:
    """Score a response by its letter, or by the text of the choice if it names no letter.

    Returns:
        1.0 or 0.0. None if neither label nor metadata tell what is correct.
    """
    metadata = metadata or {}
    letters = valid_letters(metadata)
    correct = correct_letter(label, metadata, letters)
    text = _correct_text(label, metadata, correct)
    if correct is None and text is None:
        return None
    response = after_thinking(response)
    said = _normal(last_boxed(response) or response.strip().split("\n")[-1])
    # The text of a choice is that choice, also where it has a letter in it: "A proton".
    exact = [
        a for a, choice in _choice_texts(metadata, letters).items() if len(said) > 1 and said == _normal(str(choice))
    ]
    found = exact[0] if len(exact) == 1 else extract_letter(response, letters)
    letter = (found or _chosen_text(response, metadata, letters)) if correct else None
    if letter is not None:
        return float(letter == correct)
    wanted = _normal(text) if text is not None else ""
    return float(wanted != "" and (said == wanted or f" {wanted} " in f" {said} "))


def _normal(text: str) -> str:
    """Normalize a text as :func:`normalize_answer`, which drops punctuation, but keep -3, 3 and 0.3 apart."""
    words = {".": "point", "/": "over", "^": "to"}
    return normalize_answer(_BETWEEN.sub(lambda found: words[found[1]], _MINUS.sub("minus", text)))


def _chosen_text(response: str, metadata: Mapping[str, object], letters: str) -> str | None:
    """Return the letter of the only choice whose text is in the last line of a response, or None."""
    last = f" {_normal(response.strip()[-_TAIL:].split(chr(10))[-1])} "
    texts = {letter: _normal(str(text)) for letter, text in _choice_texts(metadata, letters).items()}
    found = {letter: text for letter, text in texts.items() if text and f" {text} " in last}
    # A choice that is part of another one, like "2 cm" of "12.2 cm and 2 cm", does not count beside it.
    longest = [letter for letter, text in found.items() if not any(text != t and text in t for t in found.values())]
    return longest[0] if len(longest) == 1 else None


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
        found = re.fullmatch(rf"\(?{_STYLES}\(?({one})\)?[.)]?\s*\}}*.*", boxed.strip(), re.DOTALL)
        found = found or re.fullmatch(rf"\(?{_STYLES}\(?((?i:{one}))\)?[.)]?\s*\}}*\)?", boxed.strip())
        # A box that begins with two letters contains a word: the A of "Answer" is not a choice.
        if found and not re.match(r"[A-Za-z]{2}", boxed.strip()):
            return found[1].upper()
    for pattern in (
        rf"(?i:answer|choice|option)\**\s*(?i:is|:|=)*\s*[:=]?\s*\**\s*\(?({one})\)?(?![A-Za-z'])",
        rf"(?i:answer|choice|option)\s*(?i:is|:|=)+\s*\**\s*\(?((?i:{one}))\)?\**[.]?\s*$",
        rf"(?i:settle[ds]? on|choose|chose|select(?:ed)?|pick(?:ed)?|go with)\s+\(?({one})\)?(?![A-Za-z'])",
        rf"^\s*\**\(?({one})\)?[.):]?\**\s*$",
        rf"(?<![A-Za-z'])\(?({one})\)(?![A-Za-z])",
    ):
        matches = re.findall(pattern, response, re.MULTILINE)
        if matches:
            return str(matches[-1]).upper()
    # An I before a word of small letters is the pronoun.
    alone = re.findall(rf"(?<![A-Za-z'])(?!I\s+[a-z])({one})(?![A-Za-z'])", response[-100:])
    return alone[-1] if len(set(alone)) == 1 else None


def valid_letters(metadata: Mapping[str, object]) -> str:
    """Return the letters that may be chosen: those of the metadata, else one per choice, else A to J."""
    given, choices = metadata.get("valid_letters"), metadata.get("choices")
    if isinstance(given, str | Sequence) and given:
        return "".join(str(letter).upper() for letter in given)
    if isinstance(choices, Mapping):
        return "".join(str(letter).upper() for letter in choices)
    return string.ascii_uppercase[: len(choices)] if isinstance(choices, Sequence) and choices else _LETTERS


def correct_letter(label: object, metadata: Mapping[str, object], letters: str) -> str | None:
    """Return the correct letter, or None if there is none.

    It is ``correct_letter`` of the metadata, else that of a label that is a letter, else that of the choice whose text
    the metadata name, else that of a label that is an index or a choice's text.
    """
    for value in (metadata.get("correct_letter"), label):
        if (
            isinstance(value, str)
            and len(value.strip().strip("()")) == 1
            and value.strip().strip("()").upper() in letters
        ):
            return value.strip().strip("()").upper()
    named = metadata.get("correct_answer") or metadata.get("answer_text")
    text = named or label
    texts = _choice_texts(metadata, letters).items() if isinstance(text, str) else ()
    found = [letter for letter, choice in texts if _normal(str(choice)) == _normal(str(text))]
    if named and found:  # a label that is a number can be the text of a choice, too
        return found[0]
    indexed = metadata.get("choices") or metadata.get("valid_letters")
    if indexed and isinstance(label, int | str) and str(label).isdigit() and int(label) < len(letters):
        return letters[int(label)]
    return found[0] if found else None


def unreadable(label: object, metadata: Mapping[str, object]) -> str:
    """Explain why the correct letter is unknown."""
    keys = ", ".join(sorted(metadata)) or "none"
    return (
        f"label {label!r} is neither a letter nor a text, "
        f"and metadata has no usable correct_letter, correct_answer or answer_text (its keys: {keys})"
    )


def _choice_texts(metadata: Mapping[str, object], letters: str) -> dict[str, object]:
    choices = metadata.get("choices")
    if isinstance(choices, Mapping):
        return {str(letter).upper(): text for letter, text in choices.items()}
    return dict(zip(letters, choices, strict=False)) if isinstance(choices, Sequence) else {}


def _correct_text(label: object, metadata: Mapping[str, object], letter: str | None) -> str | None:
    text = metadata.get("correct_answer") or metadata.get("answer_text")
    text = text or _choice_texts(metadata, valid_letters(metadata)).get(letter or "")
    if text:
        return str(text)
    said = str(label).strip() if isinstance(label, str | int | float) else ""
    return said if len(said) > 1 or (said and letter is None) else None
