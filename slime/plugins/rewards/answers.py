r"""Find answers in text, convert them to a normal form, and compare two of them without a symbolic
parser.

What a symbolic parser would calculate although it is no arithmetic is decided here: dates, times,
ranges, scores, telephone numbers and versions (``10-12`` is not -2), words (``evil`` is not
``live``), units, and the case of letters.

Everything here takes linear time in the length of the text (no nested quantifiers), so it may run
in the event loop.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

_NUMBER_IN_TEXT = re.compile(
    r"(?<![\w.])[-+−]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\w))?(?![\d])"
    r"|(?<![\w.])[-+−]?\.\d+"
)
_PLAIN_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:/\d+|[eE][-+]?\d{1,3})?")
_MIXED = re.compile(r"([-+]?)(\d+)(?:\s+(\d+)/(\d+)|\s*\\frac\{(\d+)\}\{(\d+)\})")  # 3 1/2
_SIMPLE_FRAC = re.compile(r"([-+]?)\\frac\{(\d+)\}\{(\d+)\}")


def last_number(text: str) -> Fraction | None:
    """Return the value of the last number in ``text`` (thousands separators and ``$`` are allowed),
    or None.

    >>> last_number("7 times 8 is 56.")
    Fraction(56, 1)
    """
    found = _NUMBER_IN_TEXT.findall(_without_number_words(text))
    return as_number(found[-1]) if found else None


def as_number(text: str) -> Fraction | None:
    r"""Return the value of ``text`` if it is a number, else None.

    Numbers are written as ``-1,234.50``, ``3/4``, ``\frac{3}{4}``, ``3 1/2``, ``$5`` or ``1e6``.

    A percent sign is dropped, so that ``5%`` equals the label ``5``.
    """
    # Signs around a number that do not change its value.
    plain = text.strip().strip("$").replace("\\$", "").replace("$", "").replace("−", "-").strip()
    plain = re.sub("[€£¥₹]", "", plain).replace("\\!", "").replace("{,}", ",")
    plain = plain.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    plain = plain.removesuffix(".").removesuffix("%").removesuffix("\\").rstrip()
    mixed = _MIXED.fullmatch(plain)
    if mixed and len(plain) <= 200 and int(bottom := mixed[4] or mixed[6]):
        return (int(mixed[2]) + Fraction(int(mixed[3] or mixed[5]), int(bottom))) * (
            -1 if mixed[1] == "-" else 1
        )
    frac = _SIMPLE_FRAC.fullmatch(plain)
    if frac:
        plain = f"{frac[1]}{frac[2]}/{frac[3]}"
    if "," in plain:
        if not re.fullmatch(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", plain):
            return None
        plain = plain.replace(",", "")

    if len(plain) > 200 or not _PLAIN_NUMBER.fullmatch(plain):
        return None
    if "/" in plain:
        top, bottom = plain.split("/")
        return Fraction(top) / Fraction(bottom) if int(bottom) else None
    return Fraction(plain)


def normalize_math(text: str) -> str:
    r"""Convert a short LaTeX answer to a normal form without spaces, ``$``, ``%``, ``°`` or text
    commands.

    Two answers with the same normal form are equal. Two with different forms may still be equal.
    """
    out = re.sub(r"\s+", " ", text).strip().strip("$").strip().removesuffix(".")
    # 3 1/2 is not 31/2
    out = re.sub(r"(?<![\d/.])(\d+) (\d+)/(\d+)(?![\d/])", r"\1\\frac{\2}{\3}", out)
    out = re.sub(r"\\(?:left|right|big|Big|bigg|Bigg)(?![A-Za-z])", "", out)
    out = re.sub(
        r"\\(?:text|mathrm|textbf|mathbf|textit|mbox|operatorname)\s*\{([^{}]*)\}", r"\1", out
    )
    out = re.sub(r"\\(?:[dtc]frac)(?![A-Za-z])", r"\\frac", out)
    out = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", out)
    out = re.sub(r"\\sqrt\s*(\d)", r"\\sqrt{\1}", out)
    out = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°", "", out)
    out = re.sub(r"\\[!,;:> ]|\\q?quad(?![A-Za-z])|~", "", out)
    out = (
        out.replace("\\%", "")
        .replace("%", "")
        .replace("\\$", "")
        .replace("$", "")
        .replace("−", "-")
    )
    out = re.sub(r"\\varnothing|\\\{\s*\\\}", r"\\emptyset", out)
    # Drop the left side of "x = 5", "f(x) = 5", "x \in (0, 1)" and "\approx 5".
    left = (
        r"^(?:[A-Za-z]\w?|[A-Za-z]\([A-Za-z]\))?\s*(?:=|\\in(?![A-Za-z])|\\approx(?![A-Za-z]))\s*"
    )
    out = re.sub(left, "", out.strip())
    # Drop thousands separators, but not the commas of a tuple, an interval or a set.
    out = (
        re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", out)
        if "(" not in out and "[" not in out and "\\{" not in out
        else out
    )
    out = re.sub(r"(?<![\d.])\.(?=\d)", "0.", out)
    # "East" is "east", but the variable A is not a
    words = re.fullmatch(r"[A-Za-z\s]{3,}|(?i:no)", out)
    # 10 000
    out = re.sub(
        r"(?<![\d.])\d{1,3}(?: \d{3})+(?!\d)", lambda number: number[0].replace(" ", ""), out
    )
    return re.sub(r"\s+(?!\d)|(?<!\d)\s+", "", out.lower() if words else out)  # "2 3" is not 23


def without_styles(text: str) -> str:
    r"""Return a text without LaTeX's styles, spaces and escapes: ``\text{New York}`` becomes ``New
    York``.
    """
    text = re.sub(
        r"\\(?:(?:text|math)(?:bf|rm|it|sf|tt|normal)?|mbox)(?![A-Za-z])\s*\{([^{}]*)\}?",
        r"\1",
        text,
    )
    text = re.sub(
        r"\\(?:(?:text|math)(?:bf|rm|it|sf|tt|normal)?|mbox)(?![A-Za-z])\s*\{([^{}]*)\}?",
        r"\1",
        text,
    )
    return re.sub(r"\\[,;:! ]|~", " ", re.sub(r"\\([&%$#_])", r"\1", text))


_SYMBOLS = {
    "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "⁄": "/", "√": "\\sqrt ", "π": "\\pi ",
    "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ",
    "°": "^\\circ", "±": "\\pm ", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "\u00a0": " ", "\u202f": " ",
    "∅": "\\emptyset ", **{letter: f"\\mathbb{{{unicodedata.normalize('NFKC', letter)}}}" for letter in "ℝℤℚℕℂ"},
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\w+))")


def as_latex(text: str) -> str:
    r"""Convert Unicode mathematics to LaTeX: ``√2`` to ``\sqrt{2}``, ``x²`` to ``x^{2}``, ``½`` to
    ``1/2``.

    Full-width digits become ASCII digits, and ``18 million`` becomes ``18000000``.
    """
    text = _without_number_words(text)
    if text.isascii():
        return text
    text = re.sub("(?<=[0-9])(?=[¼-¾⅐-⅞])", " ", text)  # 1½ is not 11/2
    text = _RAISED.sub(lambda found: "^{" + found[0].translate(_SUPERSCRIPTS) + "}", text)
    text = _ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", text)
    text = "".join(_SYMBOLS.get(c, c) for c in text)
    return "".join(_SYMBOLS.get(c, c) for c in unicodedata.normalize("NFKC", text))


_WORD_VALUES = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
    "lakh": 10**5, "crore": 10**7,
}  # fmt: skip
_NUMBER_WORD = re.compile(
    r"(?:(?<![\d.,])(\d[\d,]{0,30}(?:\.\d{1,30})?)|(?<=\}))"
    rf"((?:\s|\\[,;:! ]|[~$])*(?:\\(?:text|textrm|mathrm|mbox)\s*\{{\s*)?)({'|'.join(_WORD_VALUES)})s?(?![A-Za-z])",
    re.IGNORECASE,
)


def _without_number_words(text: str) -> str:
    """Replace the word of a large number and the number before it by its value: ``18 million`` by
    ``18000000``.
    """

    def value(found: re.Match[str]) -> str:
        factor = _WORD_VALUES[found[3].lower()]
        if found[1] is None:
            return f"\\times {factor}{found[2]}"
        return f"{Decimal(found[1].replace(',', '')) * factor:f}{found[2]}"

    return _NUMBER_WORD.sub(value, text)


_LONGEST_ANSWER = 500  # characters; a longer "answer" is a derivation and counts as wrong
_BASE_TEN = re.compile(r"(?<=[0-9])_(?:\{(?:10|ten)\}|10\b)")
_LAST_MARK = re.compile(r"(?:\\\\|(?<![.\\])[.,;])\s*$")
_BASE = re.compile(r"[0-9A-Fa-f]_\{?(\d+|two|eight|sixteen)\}?\s*$")
# 2024-01-05, 10-12, 3:2, 1.2.3, (555)123-4567
_LABEL_NAME = re.compile(r"\+?(?:\(\d+\))?\d+(?:[-:/.]\d+)+")
# a single 10-12 is a calculation where the label is -2
_ANSWER_NAME = re.compile(r"\d+([-:/.])\d+(?:\1\d+)+")
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
_UNIT = re.compile(
    rf"(.*?[^\s\\,;:!~]){_SPACE}({_STYLE}\{{[^{{}}]*\}}{_POWER}|\\?%|{_DEGREE})", re.DOTALL
)
_BARE_UNIT = re.compile(
    rf"((?:[^A-Za-z\\]|\\[A-Za-z]++|\\[^A-Za-z])*[\d}})])({_SPACE})([A-Za-z][A-Za-z./ ]*{_POWER})"
)
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
    """An answer, divided: ``10`` and ``cm`` of ``10\\text{ cm}``. Letters after a number may also
    be a factor.
    """

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
    """Compare two answers by normal form, unit and value. None if only a symbolic comparison can
    decide.

    An answer without a unit equals a label with one, and the other way round; two different units
    are never equal.
    """
    gold, answer = (
        _BASE_TEN.sub("", _LAST_MARK.sub("", text.strip("` "))) for text in (gold, answer)
    )
    # Units decide first: no value is equal in two different units.
    wanted = _quantity(gold)
    found = _quantity(answer)
    if _units_differ(wanted, found):
        return False
    # Equal normal forms are equal answers, unless they say so of two different variables.
    normal = normalize_math(gold)
    other = normalize_math(answer)
    if normal and normal == other:
        variables = {match[1] for match in map(_VARIABLE.match, (gold, answer)) if match}
        return len(variables) < 2
    if _BASE.search(gold.strip("$ ")) or _BASE.search(answer.strip("$ ")):
        return _braced(gold) == _braced(answer)  # math-verify would ignore the base
    # Numbers are compared by value, and names such as dates and ranges by their text.
    gold_value = _number(wanted.value)
    value = _number(found.value)
    if gold_value is not None and value is not None:
        return gold_value == value
    gold_name = _name(wanted.value)
    name = _name(found.value, ":" if ":" in gold_name else "-")
    if not _NUMBER.fullmatch(gold_name) and (
        _LABEL_NAME.fullmatch(gold_name) or _ANSWER_NAME.fullmatch(name)
    ):
        return gold_name == name
    # What a symbolic parser would get wrong: words as products of letters, letters of another case,
    # sets as tuples.
    words = normal.isalpha() and other.isalpha() and (len(normal) > 3 or "\\text" in gold)
    kinds = [(_SET, _TUPLE), (_TUPLE, _SET)]
    if (
        words
        or normal.lower() == other.lower()
        or any(a.fullmatch(normal) and b.fullmatch(other) for a, b in kinds)
    ):
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
    currency = _CURRENCY.fullmatch(text)
    marked = _UNIT.fullmatch(text)
    bare = _BARE_UNIT.fullmatch(text)
    if currency:
        return _Quantity(currency[1] + currency[3].strip(), _unit(currency[2]))
    if marked:
        return _Quantity(marked[1], _unit(marked[2]))
    if bare and bare[2] and re.match("[A-Za-z]{2}", bare[3]) and bare[3] not in _PRODUCTS:
        return _Quantity(bare[1], _unit(bare[3]))
    return _Quantity(text, _unit(bare[3]), factor=True) if bare else _Quantity(text)


def _unit(text: str) -> str:
    """Return the name of a unit without styles and plural. Names of two letters keep their case: Mm
    is not mm.
    """
    text = re.sub(r"\([^()]*\)|[{}\\]", "", re.sub(_CIRCLE, "°", _STYLED.sub(r"\1", text)))
    text = re.sub(r"[A-Za-z]{3,}", lambda word: word[0].lower(), text.replace(".", ""))
    text = re.sub(r"\b(?:square|sq) (\w+)", r"\1^2", re.sub(r"\b(?:cubic|cu) (\w+)", r"\1^3", text))
    text = _UNIT_NAME.sub(lambda name: _SAME_UNITS[name[0]], re.sub(r"(?<=[a-z]{2})s\b", "", text))
    return re.sub(r"\s*([/°])\s*", r"\1", text).strip()


def _units_differ(wanted: _Quantity, found: _Quantity) -> bool:
    units = wanted.unit, found.unit
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
    """Return the form in which dates, ranges and the like are compared; ``joint`` stands for the
    word "to".
    """
    name = re.sub(r"(?<=\d)(?:\\text\{)?to\}?(?=\d)", joint, normalize_math(text))
    return re.sub("-+", "-", name.replace("\\colon", ":"))
