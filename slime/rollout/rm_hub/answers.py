r"""Compare two mathematical answers by normal form and by value, without a symbolic parser.

What a symbolic parser would calculate although it is no arithmetic is decided here: dates, times, ranges, scores,
telephone numbers and versions (``10-12`` is not -2), words (``evil`` is not ``live``), units, and the case of letters.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from slime.rollout.rm_hub.text import as_number, normalize_math

_LONGEST_ANSWER = 500  # characters; a longer "answer" is a derivation and counts as wrong
_BASE_TEN = re.compile(r"(?<=[0-9])_(?:\{(?:10|ten)\}|10\b)")
_LAST_MARK = re.compile(r"(?:\\\\|(?<![.\\])[.,;])\s*$")
_BASE = re.compile(r"[0-9A-Fa-f]_\{?(\d+|two|eight|sixteen)\}?\s*$")
_LABEL_NAME = re.compile(r"\+?(?:\(\d+\))?\d+(?:[-:/.]\d+)+")  # 2024-01-05, 10-12, 3:2, 1.2.3, (555)123-4567
_ANSWER_NAME = re.compile(r"\d+([-:/.])\d+(?:\1\d+)+")  # a single 10-12 is a calculation where the label is -2
_NUMBER = re.compile(r"\d*\.\d+|\d+/\d+")
_VARIABLE = re.compile(r"\s*([A-Za-z])\s*=")
_SET = re.compile(r"\\\{[^|:]*\\\}")
_TUPLE = re.compile(r"[(\[][^()\[\]]*[)\]]")

_STYLE = r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*"
_STYLED = re.compile(_STYLE + r"\{([^{}]*)\}")
_TEXT_OVER_TEXT = re.compile(rf"\\frac\s*\{{{_STYLED.pattern}\}}\s*\{{{_STYLED.pattern}\}}")
_TEXT_BY_TEXT = re.compile(rf"({_STYLE}\{{[^{{}}]*)\}}\s*(/?)\s*{_STYLE}\{{")
_SPACE = r"(?:\s|\\[,;:! ]|~)*"
_POWER = r"(?:\^(?:-?\d|\{-?\d\}))?"
_CIRCLE = r"\^\s*\{?\s*\\circ\s*\}?"
_DEGREE = rf"{_CIRCLE}{_SPACE}(?:{_STYLE}\{{[CF]\}}|[CF])?"
_UNIT = re.compile(rf"(.*?[^\s\\,;:!~]){_SPACE}({_STYLE}\{{[^{{}}]*\}}{_POWER}|\\?%|{_DEGREE})", re.DOTALL)
_BARE_UNIT = re.compile(rf"((?:[^A-Za-z\\]|\\[A-Za-z]++|\\[^A-Za-z])*[\d}})])({_SPACE})([A-Za-z][A-Za-z./ ]*{_POWER})")
_DOLLAR = re.compile(r"(?<!\\)\$")
_CURRENCY = re.compile(r"([-+]?)\s*(\\?\$|[€£¥₹])(.+)", re.DOTALL)
_SAME_UNITS = {
    "percent": "%", "degree": "°", "dollar": "$", "usd": "$", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee",
    "kilo": "k", "centi": "c", "milli": "m", "meter": "m", "metre": "m", "gram": "g", "liter": "l", "litre": "l",
    "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "feet": "ft", "foot": "ft", "inche": "in",
    "inch": "in", "L": "l", "celsiu": "C", "fahrenheit": "F", "mile": "mi", "per": "/", "AM": "am", "PM": "pm",
}  # fmt: skip
_UNIT_NAME = re.compile("|".join(map(re.escape, sorted(_SAME_UNITS, key=len, reverse=True))))
_OTHER_VALUE = re.compile(r"\b(?:or|not|wrong|incorrect|and|half|halves|thirds?|k|mn|bn)\b")
_PRODUCTS = {"ab", "bc", "c", "d", "o", "t"}  # which math-verify would drop as if they were units


class _Quantity(NamedTuple):
    """An answer, divided: ``10`` and ``cm`` of ``10\\text{ cm}``. Letters after a number may also be a factor."""

    value: str
    unit: str = ""
    factor: bool = False


def decide(gold: str, answer: str) -> bool | None:
    """Compare two answers. None if only a symbolic comparison can decide.

    A number with a base (``11_2``) equals only the same digits with the same base.
    """
    if not answer or len(answer) > max(_LONGEST_ANSWER, 2 * len(gold)):
        return False
    return same_answer(gold, answer)


def same_answer(gold: str, answer: str) -> bool | None:
    """Compare two answers by normal form, unit and value. None if only a symbolic comparison can decide.

    An answer without a unit equals a label with one, and the other way round; two different units are never equal.
    """
    gold, answer = (_BASE_TEN.sub("", _LAST_MARK.sub("", text.strip("` "))) for text in (gold, answer))
    wanted, found = _quantity(gold), _quantity(answer)
    if _units_differ(wanted, found):
        return False
    normal, other = normalize_math(gold), normalize_math(answer)
    if normal and normal == other:
        variables = {match[1] for match in map(_VARIABLE.match, (gold, answer)) if match}
        return len(variables) < 2
    if _BASE.search(gold.strip("$ ")) or _BASE.search(answer.strip("$ ")):
        return _braced(gold) == _braced(answer)  # math-verify would ignore the base
    gold_value, value = _number(wanted.value), _number(found.value)
    if gold_value is not None and value is not None:
        return gold_value == value
    gold_name = _name(wanted.value)
    name = _name(found.value, ":" if ":" in gold_name else "-")
    if not _NUMBER.fullmatch(gold_name) and (_LABEL_NAME.fullmatch(gold_name) or _ANSWER_NAME.fullmatch(name)):
        return gold_name == name
    words = normal.isalpha() and other.isalpha() and (len(normal) > 3 or "\\text" in gold)
    kinds = [(_SET, _TUPLE), (_TUPLE, _SET)]
    if words or normal.lower() == other.lower() or any(a.fullmatch(normal) and b.fullmatch(other) for a, b in kinds):
        return False
    return None


def value_of(answer: str) -> Fraction | None:
    """Return the value of an answer that is a number, with or without a unit; else None."""
    return _number(_quantity(answer).value)


def ends_with_product(answer: str) -> bool:
    """Whether an answer ends with variables that math-verify would take for a unit: ``3ab``."""
    return _quantity(answer).unit in _PRODUCTS


def _quantity(answer: str) -> _Quantity:
    text = answer.strip().removesuffix(".").strip()
    if len(_DOLLAR.findall(text)) % 2 == 0:
        text = _DOLLAR.sub("", text).strip()
    styled = _STYLED.fullmatch(text)
    text = styled[1].strip() if styled else text
    text = _TEXT_BY_TEXT.sub(r"\1\2", _TEXT_OVER_TEXT.sub(r"\\text{\1/\2}", text))
    currency, marked, bare = _CURRENCY.fullmatch(text), _UNIT.fullmatch(text), _BARE_UNIT.fullmatch(text)
    if currency:
        return _Quantity(currency[1] + currency[3].strip(), _unit(currency[2]))
    if marked:
        return _Quantity(marked[1], _unit(marked[2]))
    if bare and bare[2] and re.match("[A-Za-z]{2}", bare[3]) and bare[3] not in _PRODUCTS:
        return _Quantity(bare[1], _unit(bare[3]))
    return _Quantity(text, _unit(bare[3]), factor=True) if bare else _Quantity(text)


def _unit(text: str) -> str:
    """Return the name of a unit without styles and plural. Names of two letters keep their case: Mm is not mm."""
    text = re.sub(r"\([^()]*\)|[{}\\]", "", re.sub(_CIRCLE, "°", _STYLED.sub(r"\1", text)))
    text = re.sub(r"[A-Za-z]{3,}", lambda word: word[0].lower(), text.replace(".", ""))
    text = re.sub(r"\b(?:square|sq) (\w+)", r"\1^2", re.sub(r"\b(?:cubic|cu) (\w+)", r"\1^3", text))
    text = _UNIT_NAME.sub(lambda name: _SAME_UNITS[name[0]], re.sub(r"(?<=[a-z]{2})s\b", "", text))
    return re.sub(r"\s*([/°])\s*", r"\1", text).strip()


def _units_differ(wanted: _Quantity, found: _Quantity) -> bool:
    units = (wanted.unit, found.unit)
    if not all(units):
        return any(_OTHER_VALUE.search(unit) for unit in units)
    if wanted.factor and found.factor and not (wanted.unit.isalpha() and found.unit.isalpha()):
        return False
    if "°" in units and all(unit.startswith("°") for unit in units):
        return False
    return sorted(wanted.unit) != sorted(found.unit)


def _braced(number: str) -> str:
    return re.sub(r"_\{?(\w+)\}?$", r"_{\1}", normalize_math(number))


def _number(text: str) -> Fraction | None:
    """Return the value of a number, also in parentheses as in ``(073)``, or after ``x =``."""
    bare = re.sub(r"\(([^(),]*)\)", r"\1", text.strip()) if text.strip().startswith("(") else text
    value = as_number(bare)
    return as_number(normalize_math(bare)) if value is None else value


def _name(text: str, joint: str = "-") -> str:
    """Return the form in which dates, ranges and the like are compared; ``joint`` stands for the word "to"."""
    name = re.sub(r"(?<=\d)(?:\\text\{)?to\}?(?=\d)", joint, normalize_math(text))
    return re.sub("-+", "-", name.replace("\\colon", ":"))
