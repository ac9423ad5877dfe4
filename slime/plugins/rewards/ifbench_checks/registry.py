"""The registry of instruction checkers, the check of a row's instructions against it, and how
checkers split a response into words, sentences and lines, with regular expressions that take linear
time.

The published checkers use nltk's trained models, which must be downloaded. The rules here need no
download. They differ from nltk only in rare cases: unusual abbreviations, and words that are joined
by punctuation without a space.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import string
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

Checker = Callable[..., bool]
Relation = Literal["less than", "at least"]

CHECKERS: dict[str, Checker] = {}
NEEDS: dict[str, str] = {}  # id -> package that its checker imports


def checker(instruction_id: str, needs: str | None = None) -> Callable[[Checker], Checker]:
    """Register ``function(response, *, **kwargs) -> bool`` under ``instruction_id``.

    :func:`instruction_problem` checks the ``kwargs`` of a row against the annotations of the
    keyword arguments.

    Args:
        instruction_id: The public id, such as ``count:numbers``.
        needs: A package that the checker imports and that may not be installed.
    """

    def register(function: Checker) -> Checker:
        if instruction_id in CHECKERS:
            raise ValueError(f"instruction id {instruction_id!r} has two checkers")
        CHECKERS[instruction_id] = function
        if needs:
            NEEDS[instruction_id] = needs
        return function

    return register


def compare(count: int, relation: Relation, bound: int) -> bool:
    """Compare ``count`` with ``bound`` by one of IFEval's two relations."""
    return count < bound if relation == "less than" else count >= bound


def instructions_problem(instructions: object, kwargs: object) -> str | None:
    """Describe why the checkers cannot use a row's instructions, or return None.

    Args:
        instructions: ``instruction_id_list`` of the row: a non-empty list of ids.
        kwargs: ``kwargs`` of the row: one dict or None for each instruction. None if no instruction
            has arguments.
    """
    if not isinstance(instructions, Sequence) or isinstance(instructions, str) or not instructions:
        return (
            "instruction_id_list must be a non-empty list of instruction ids, not "
            f"{_short(instructions)}"
        )
    if kwargs is None:
        kwargs = [{}] * len(instructions)
    if (
        not isinstance(kwargs, Sequence)
        or isinstance(kwargs, str)
        or len(kwargs) != len(instructions)
    ):
        return (
            f"kwargs must be a list of {len(instructions)} dicts, one for each instruction, not "
            f"{_short(kwargs)}"
        )
    found = (
        instruction_problem(name, given) for name, given in zip(instructions, kwargs, strict=True)
    )
    return next((problem for problem in found if problem), None)


def instruction_problem(instruction_id: object, kwargs: object) -> str | None:
    """Describe why the checker of one instruction cannot run, or return None."""
    if not isinstance(instruction_id, str) or instruction_id not in CHECKERS:
        return f"instruction id {_short(instruction_id)} has no built-in checker"
    needs = NEEDS.get(instruction_id)
    if needs and importlib.util.find_spec(needs) is None:
        return (
            f"instruction {instruction_id} needs the package {needs}, which is not installed (pip "
            f"install {needs})"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        return f"instruction {instruction_id}: kwargs must be a dict, not {_short(kwargs)}"
    try:
        arguments(instruction_id, kwargs)
    except ValueError as error:
        return f"instruction {instruction_id}: {error}"
    return None


def arguments(instruction_id: str, kwargs: Mapping[str, object] | None) -> dict[str, Any]:
    """Return the keyword arguments for a checker.

    Entries that are None are dropped, because data sets fill unused columns with None.

    Raises:
        ValueError: An argument is missing, unknown or of the wrong type.
    """
    # The signature of a checker says which arguments it takes.
    given = {name: value for name, value in (kwargs or {}).items() if value is not None}
    hints = _keyword_types(instruction_id)
    missing = [name for name in hints if name not in given]
    unknown = [name for name in given if name not in hints]
    if missing or unknown:
        takes = ", ".join(hints) or "none"
        wrong = {"missing": missing, "unknown": unknown}
        what = [f"{kind}: {', '.join(names)}" for kind, names in wrong.items() if names]
        raise ValueError(f"its kwargs are {takes}; {'; '.join(what)}")
    return {name: _converted(name, given[name], hint) for name, hint in hints.items()}


@cache
def _keyword_types(instruction_id: str) -> dict[str, Any]:
    function = CHECKERS[instruction_id]
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    return {p.name: hints[p.name] for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _converted(name: str, value: object, hint: object) -> Any:
    """Convert ``value`` to the annotated type. Whole floats become ints: tables may store ints as
    floats.
    """
    # Tables of data sets store numbers in other types than the checkers have.
    if get_origin(hint) is Literal and value in get_args(hint):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        if hint is float:
            return float(value)
        if hint is int and (isinstance(value, int) or value.is_integer()):
            return int(value)
    if hint is str and isinstance(value, str) and value.strip():
        return value
    if (
        hint == list[str]
        and isinstance(value, list | tuple)
        and value
        and all(isinstance(v, str) and v for v in value)
    ):
        return list(value)
    raise ValueError(
        f"{name} must be {_WORDS.get(hint) or ' or '.join(map(repr, get_args(hint)))}, not "
        f"{_short(value)}"
    )


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a non-empty text",
    list[str]: "a list of texts",
}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


PUNCTUATION = string.punctuation + "“”‘’«»—–…‽¿¡、。！？"
_REMOVED = str.maketrans("", "", PUNCTUATION)
_END = re.compile(r"(?<![.!?…‽。！？])[.!?…‽。！？]++[\"'”’»)\]*_]*+(?=\s|\Z)")
_TOKEN = re.compile(r"\w+(?:['’.\-]\w+)*")
_TITLES_AND_SIGNS = (
    "mr mrs ms dr prof rev hon st sr jr gen col capt lt sgt vs e.g i.e cf fig vol inc ltd corp "
    "approx"
)
_ABBREVIATIONS = frozenset(_TITLES_AND_SIGNS.split())
_LAST_WORD = re.compile(r"[\w.]*\Z")


def word_tokens(text: str) -> list[str]:
    r"""Return the runs of word characters (``\w+``). IFEval counts words this way; ``don't`` is
    two.
    """
    return re.findall(r"\w+", text)


def words(text: str) -> list[str]:
    """Split at white space and remove the punctuation around each word. Pieces of only punctuation
    are dropped.

    >>> words("Well -- that's (almost) it!")
    ['Well', "that's", 'almost', 'it']
    """
    return [word for piece in text.split() if (word := piece.strip(PUNCTUATION))]


def tokens(text: str) -> list[str]:
    """Return the words, including inner hyphens, apostrophes and periods: ``U.S.A``, ``well-known``
    and ``I'M``.
    """
    return _TOKEN.findall(text)


def without_punctuation(text: str) -> str:
    """Remove all punctuation characters: ``1,000`` becomes ``1000``."""
    return text.translate(_REMOVED)


def sentences(text: str) -> list[str]:
    """Split a text into sentences, with their closing punctuation. As in nltk, a line break alone
    ends no sentence.

    A sentence ends with ``.``, ``!``, ``?`` or an ellipsis (and closing quotes and brackets) before
    white space or the end of the text. A single period after a title, a known abbreviation or an
    initial does not end a sentence. After ``etc.``, ``a.m.`` and the like, it ends one unless a
    lower-case letter follows. The rest of the text after the last such end is a sentence, too.
    """
    found = []
    begin = 0
    # Each possible end, unless the sentence goes on after it.
    for end in _END.finditer(text):
        if end[0] == "." and _goes_on(text, end.start()):
            continue
        found.append(text[begin : end.end()])
        begin = end.end()
    found.append(text[begin:])
    return [stripped for sentence in found if (stripped := sentence.strip())]


def _goes_on(text: str, period: int) -> bool:
    """Whether the sentence continues after the single period at this position."""
    # A few characters on both sides decide, so that the time stays linear.
    rest = text[period + 1 : period + 33].lstrip()
    if not rest:
        return False
    before = _LAST_WORD.search(text[max(0, period - 32) : period])
    word = before[0] if before else ""
    initial = len(word) == 1 and word.isupper() and word != "I"
    return (
        initial
        or word.lower() in _ABBREVIATIONS
        or (rest[0].islower() and ("." in word or word.lower() == "etc"))
    )


def sentence_end(sentence: str) -> str:
    """Return the mark before closing quotes and brackets that ends a sentence: ``.``, ``?`` or
    ``!``, else "".
    """
    last = sentence.rstrip("\"'”’»)]*_")[-1:]
    return last if last in ".?!" else ""


def lines(text: str) -> list[str]:
    """Return the lines that are not blank, with their indentation."""
    return [line for line in text.split("\n") if line.strip()]


def enclosed(text: str, opening: str, closing: str) -> list[str]:
    """Return the texts between ``opening`` and the next ``closing`` on the same line, without
    overlaps, in linear time.

    >>> enclosed("[a] and [[b] [c", "[", "]")
    ['a', '[b']
    """
    found = []
    for line in text.split("\n"):
        begin = line.find(opening)
        while begin >= 0:
            inner = begin + len(opening)
            end = line.find(closing, inner)
            if end < 0:
                break
            found.append(line[inner:end])
            begin = line.find(opening, end + len(closing))
    return found
