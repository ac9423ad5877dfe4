"""Reward ``gpqa``: 1.0 for the correct choice of a multiple-choice question, else 0.0.

The reward reads these keys of the metadata: ``choices`` (a list, or a dict from letter to text),
``valid_letters`` (default: one per choice, or A to J), ``correct_letter``, ``correct_answer`` and
``answer_text`` (the text of the correct choice). The label may be the letter, the text of the
correct choice, or its index in ``choices``. Without choices, a label that is no letter is compared
with the response as text.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence

from slime.data.reasoning import after_thinking
from slime.data.sample import Sample
from slime.plugins.rewards.answers import without_styles
from slime.plugins.rewards.simple import normalize_answer
from slime.rollout.rm_hub.outcome import mark_unscored
from slime.rollout.rm_hub.reward import Reward, last_boxed

_LETTERS = string.ascii_uppercase[:10]
_MINUS = re.compile(r"(?<![\w.)])[-−](?=[\d.])")
_BETWEEN = re.compile(r"(?<=[\w)])([./^])(?=[({]*(?:minus)?\d)")
_NAMES = r"(?i:answer|choice|option)"
# the first of these that is followed by a choice decides, where it stands last
_BEFORE_A_CHOICE = (
    rf"(?i:answer)[\s*]*(?i:is|:|=)[\s:=*]*(?:{_NAMES})?[\s*]*",
    rf"{_NAMES}\**\s*(?i:is|:|=)*\s*[:=]?\s*\**\s*",
    r"(?i:settle[ds]? on|choose|chose|select(?:ed)?|pick(?:ed)?|go with)\s+",
)
_TAIL = 4000  # characters at the end of a response in which the choice is searched

# Behind a letter that stands neither in a word nor in a formula.
_FREE = r"(?![A-Za-z'’\d_^{(]|\s*[=^\\]|\s*[*<>]\s*[\w.-]|\s*[+-](?!\s*[A-Za-z]{2})|\s+[a-z](?![A-Za-z]))"


def gpqa_reward(sample: Sample) -> float | None:
    """Score one sample. If label and metadata do not tell what is correct, the sample is marked as
    unscored.
    """
    reward = compute_gpqa_reward(sample.response, sample.label, sample.metadata)
    if reward is None:
        mark_unscored(sample, "error", unreadable(sample.label, sample.metadata))
    return reward


def compute_gpqa_reward(
    response: str | None, label: object, metadata: Mapping[str, object] | None = None
) -> float | None:
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
    response = after_thinking(response or "")
    boxed = last_boxed(response)
    last_line = response.strip()[-_TAIL:].split("\n")[-1]
    if boxed == "":
        return 0.0
    said = _normal(boxed or last_line)
    # The text of a choice is that choice, also where it has a letter in it: "A proton".
    exact = [
        a
        for a, choice in _choice_texts(metadata, letters).items()
        if len(said) > 1 and said == _normal(str(choice))
    ]
    found = exact[0] if len(exact) == 1 else extract_letter(response, letters)
    if found is None and correct:
        found = _chosen_text(_normal(last_line), metadata, letters)
    if correct and (found is not None or _choice_texts(metadata, letters)):
        return float(found == correct)
    wanted = _normal(text) if text is not None else ""
    several = boxed is not None and re.search(r"[,;/&]|\b(?:and|or)\b", boxed)
    return float(wanted != "" and (said == wanted or (not several and _says(said, wanted))))


def _normal(text: str) -> str:
    """Normalize a text as :func:`normalize_answer`, which drops punctuation, but keep -3, 3 and 0.3
    apart.
    """
    words = {".": "point", "/": "over", "^": "to"}
    return normalize_answer(_BETWEEN.sub(lambda found: words[found[1]], _MINUS.sub("minus", text)))


def _says(said: str, wanted: str) -> bool:
    """Whether a normalized text contains another one, neither denied nor as one of several."""
    denied = rf" (?:not|isnt|never|neither|nor|or) {re.escape(wanted)} | {re.escape(wanted)} or "
    return f" {wanted} " in f" {said} " and not re.search(denied, f" {said} ")


def _chosen_text(said: str, metadata: Mapping[str, object], letters: str) -> str | None:
    """Return the letter of the only choice whose text is in the normalized last line of a response,
    or None.
    """
    texts = {
        letter: _normal(str(text)) for letter, text in _choice_texts(metadata, letters).items()
    }
    found = {letter: text for letter, text in texts.items() if text and _says(said, text)}
    # A choice that is part of another one, like "2 cm" of "12.2 cm and 2 cm", does not count beside
    # it.
    longest = [
        letter
        for letter, text in found.items()
        if not any(text != t and text in t for t in found.values())
    ]
    return longest[0] if len(longest) == 1 else None


def extract_letter(response: str, letters: str) -> str | None:
    """Return the letter that a response chooses; None if it names none, and an empty text if it
    names several.

    The first of these that is found decides: a boxed letter, a letter after "answer is", after
    "choice" or "option", a letter on a line of its own, a letter before a closing parenthesis, the
    only separate letter in the last 100 characters. Letters that a response denies ("not A", "A is
    wrong") do not count.
    """
    one = f"[{letters}]"
    boxed = last_boxed(response)
    choice = (
        None
        if boxed is None
        else _choice_at_start(_not_denied(without_styles(boxed), one), one, whole=True)
    )
    if choice is not None:
        return choice
    # The patterns below would take quadratic time on long runs of white space.
    response = re.sub(r"[^\S\n]+", " ", re.sub(r"\s*\n\s*", "\n", response[-_TAIL:]))
    response = _not_denied(without_styles(response).replace("$", ""), one)
    for before in _BEFORE_A_CHOICE:
        ends = [match.end() for match in re.finditer(before, response)]
        choices = (
            _choice_at_start(response[end : end + 80].split("\n")[0], one) for end in reversed(ends)
        )
        choice = next((choice for choice in choices if choice is not None), None)
        if choice is not None:
            return choice
    for pattern in (
        rf"^\s*\**\(?({one})\)?[.):]?\**\s*$",
        rf"(?<![A-Za-z'])\(?({one})\)(?![A-Za-z])",
    ):
        matches = re.findall(pattern, response, re.MULTILINE)
        if matches:
            return str(matches[-1])
    # An I before a word of small letters is the pronoun.
    alone = re.findall(rf"(?<![A-Za-z'])(?!I\s+[a-z])({one}){_FREE}", response[-100:])
    return alone[-1] if len(set(alone)) == 1 else None


def _not_denied(text: str, one: str) -> str:
    """Remove the letters that a text says are not the answer."""
    several = (
        rf"\(?{one}\)?(?:(?:\s*,\s*|\s*,?\s+(?:and|or|nor)\s+)\(?{one}\)?){{0,9}}(?![A-Za-z'])"
    )
    denial = (
        r"(?i:(?:\b|can)not|n['’]t|\\neg|\\lnot|\b(?:never|rul\w+ out|eliminat\w+|exclud\w+|except|rather than|"
        r"(?:all|anything|everything) but|neither|nor))"
    )
    between = rf"(?:(?i:be|the|choose|pick|select|{_NAMES}s?) )*"
    wrong = r"(?i:not|n['’]t|wrong|incorrect|false|impossible|ruled out|eliminated|excluded)"
    text = re.sub(rf"{denial} {between}{several}", "no", text)
    return re.sub(
        rf"(?:{_NAMES}s? )?(?<![A-Za-z']){several} ?(?:\w+ ){{0,2}}(?i:can)?{wrong}\b", "no", text
    )


def _choice_at_start(text: str, one: str, whole: bool = False) -> str | None:
    """Return the letter with which a text begins, an empty text if more letters follow as other
    choices, else None.

    A letter of a formula (``E = mc^2``, ``C_6``) and an article before a word of small letters are
    no choices.

    Args:
        whole: Whether the text is a whole answer. It then can also begin with words, as in "both A
            and B".
    """
    if re.fullmatch(rf"(?:[^A-Za-z]|\b(?:and|or)\b|\b(?i:{one})\b)*", text):
        text = re.sub(r"\b[a-z]\b", lambda letter: letter[0].upper(), text)
    text = re.sub(r"\\[lc]?dots|\\[{}]", "", text)
    letter = rf"\(?({one}){_FREE}"
    article = r"(?<!A)(?<!I)|(?!\s+[a-z])"
    first = re.match(rf"[\s*(\[]*{letter}(?:{article})", text)
    joined = rf"\s*[)\].:]*\s*(?:[,;/&+|]|\b(?:and|or)\b)[\s,;/&+|]*(?:and|or)?\s*{letter}"
    listed = rf"[\s).:\]]+{letter}(?!\s+[a-z])"
    if first is None:
        other = re.search(rf"(?<![A-Za-z']){letter}{joined}", text) if whole else None
        return None if other is None else ""
    after = re.match(rf"{joined}|{listed}", text[first.end() :])
    return "" if after and first[1] not in after.groups() else first[1]


def valid_letters(metadata: Mapping[str, object]) -> str:
    """Return the letters that may be chosen: those of the metadata, else one per choice, else A to
    J.
    """
    given = metadata.get("valid_letters")
    choices = metadata.get("choices")
    if isinstance(given, str | Sequence) and given:
        return "".join(str(letter).upper() for letter in given)
    if isinstance(choices, Mapping):
        return "".join(str(letter).upper() for letter in choices)
    return (
        string.ascii_uppercase[: len(choices)]
        if isinstance(choices, Sequence) and choices
        else _LETTERS
    )


def correct_letter(label: object, metadata: Mapping[str, object], letters: str) -> str | None:
    """Return the correct letter, or None if there is none.

    It is ``correct_letter`` of the metadata, else that of a label that is a letter, else that of
    the choice whose text the metadata name, else that of a label that is an index or a choice's
    text.
    """
    for value in (metadata.get("correct_letter"), label):
        letter = value.strip().strip("()").upper() if isinstance(value, str) else ""
        if len(letter) == 1 and letter in letters:
            return letter
    named = metadata.get("correct_answer") or metadata.get("answer_text")
    text = named or label
    texts = _choice_texts(metadata, letters).items() if isinstance(text, str) else ()
    found = [letter for letter, choice in texts if _normal(str(choice)) == _normal(str(text))]
    if named and found:  # a label that is a number can be the text of a choice, too
        return found[0]
    indexed = metadata.get("choices") or metadata.get("valid_letters")
    if (
        indexed
        and isinstance(label, int | str)
        and str(label).isdigit()
        and int(label) < len(letters)
    ):
        return letters[int(label)]
    return found[0] if found else None


def unreadable(label: object, metadata: Mapping[str, object]) -> str:
    """Explain why the correct letter is unknown."""
    keys = ", ".join(sorted(metadata)) or "none"
    return (
        f"label {label!r} is neither a letter nor a text, and metadata has no usable "
        f"correct_letter, correct_answer or answer_text (its keys: {keys})"
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


def _label_problem(label: object, metadata: Mapping[str, object]) -> str | None:
    return unreadable(label, metadata) if compute_gpqa_reward("", label, metadata) is None else None


def _own_answer(_: object, sample: Sample) -> str | None:
    letter = correct_letter(sample.label, sample.metadata, valid_letters(sample.metadata))
    return None if letter is None else f"Answer: {letter}"


GPQA = Reward(gpqa_reward, label_problem=_label_problem, own_answer=_own_answer)
