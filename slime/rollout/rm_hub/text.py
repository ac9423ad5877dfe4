"""Find answers in text (boxed contents, numbers), and convert them to a normal form for comparison.

Everything here takes linear time in the length of the text (no nested quantifiers), so it may run in the event loop.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

_NUMBER = re.compile(
    r"(?<![\w.])[-+−]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\w))?(?![\d])"
    r"|(?<![\w.])[-+−]?\.\d+"
)
_PLAIN_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:/\d+|[eE][-+]?\d{1,3})?")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?!\s|\{\s*\})")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MIXED = re.compile(r"([-+]?)(\d+)(?:\s+(\d+)/(\d+)|\s*\\frac\{(\d+)\}\{(\d+)\})")  # 3 1/2
_SIMPLE_FRAC = re.compile(r"([-+]?)\\frac\{(\d+)\}\{(\d+)\}")


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last ``\boxed{...}`` or ``\fbox{...}``, or of ``\boxed x``; None if there is no box.

    The contents of a box that is not closed are empty, because an answer before it has been taken back. An empty box,
    as in "the answer in \boxed{}", is no box.
    """
    starts = list(_BOX.finditer(text))
    return _braced(text, starts[-1].end()) if starts else None


def _braced(text: str, start: int) -> str:
    if text[start : start + 1] != "{":
        return re.split(r"[\s$]", text[start : start + 200], maxsplit=1)[0]
    depth = 0
    for mark in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return text[start + 1 : mark.start()].strip()
    return ""


def last_number(text: str) -> Fraction | None:
    """Return the value of the last number in ``text`` (thousands separators and ``$`` are allowed), or None.

    >>> last_number("7 times 8 is 56.")
    Fraction(56, 1)
    """
    found = _NUMBER.findall(_without_number_words(text))
    return as_number(found[-1]) if found else None


def as_number(text: str) -> Fraction | None:
    r"""Return the value of ``text`` if it is a number, else None.

    Numbers are written as ``-1,234.50``, ``3/4``, ``\frac{3}{4}``, ``3 1/2``, ``$5`` or ``1e6``.

    A percent sign is dropped, so that ``5%`` equals the label ``5``.
    """
    plain = text.strip().strip("$").replace("\\$", "").replace("$", "").replace("−", "-").strip()
    plain = re.sub("[€£¥₹]", "", plain).replace("\\!", "").replace("{,}", ",")
    plain = plain.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    plain = plain.removesuffix(".").removesuffix("%").removesuffix("\\").rstrip()
    mixed = _MIXED.fullmatch(plain)
    if mixed and len(plain) <= 200 and int(bottom := mixed[4] or mixed[6]):
        return (int(mixed[2]) + Fraction(int(mixed[3] or mixed[5]), int(bottom))) * (-1 if mixed[1] == "-" else 1)
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
    r"""Convert a short LaTeX answer to a normal form without spaces, ``$``, ``%``, ``°`` or text commands.

    Two answers with the same normal form are equal. Two with different forms may still be equal.
    """
    out = re.sub(r"\s+", " ", text).strip().strip("$").strip().removesuffix(".")
    out = re.sub(r"(?<![\d/.])(\d+) (\d+)/(\d+)(?![\d/])", r"\1\\frac{\2}{\3}", out)  # 3 1/2 is not 31/2
    out = re.sub(r"\\(?:left|right|big|Big|bigg|Bigg)(?![A-Za-z])", "", out)
    out = re.sub(r"\\(?:text|mathrm|textbf|mathbf|textit|mbox|operatorname)\s*\{([^{}]*)\}", r"\1", out)
    out = re.sub(r"\\(?:[dtc]frac)(?![A-Za-z])", r"\\frac", out)
    out = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", out)
    out = re.sub(r"\\sqrt\s*(\d)", r"\\sqrt{\1}", out)
    out = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°", "", out)
    out = re.sub(r"\\[!,;:> ]|\\q?quad(?![A-Za-z])|~", "", out)
    out = out.replace("\\%", "").replace("%", "").replace("\\$", "").replace("$", "").replace("−", "-")
    out = re.sub(r"\\varnothing|\\\{\s*\\\}", r"\\emptyset", out)
    # Drop the left side of "x = 5", "f(x) = 5", "x \in (0, 1)" and "\approx 5".
    left = r"^(?:[A-Za-z]\w?|[A-Za-z]\([A-Za-z]\))?\s*(?:=|\\in(?![A-Za-z])|\\approx(?![A-Za-z]))\s*"
    out = re.sub(left, "", out.strip())
    # Drop thousands separators, but not the commas of a tuple, an interval or a set.
    out = (
        re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", out) if "(" not in out and "[" not in out and "\\{" not in out else out
    )
    out = re.sub(r"(?<![\d.])\.(?=\d)", "0.", out)
    words = re.fullmatch(r"[A-Za-z\s]{3,}|(?i:no)", out)  # "East" is "east", but the variable A is not a
    out = re.sub(r"(?<![\d.])\d{1,3}(?: \d{3})+(?!\d)", lambda number: number[0].replace(" ", ""), out)  # 10 000
    return re.sub(r"\s+(?!\d)|(?<!\d)\s+", "", out.lower() if words else out)  # "2 3" is not 23


def without_styles(text: str) -> str:
    r"""Return a text without LaTeX's styles, spaces and escapes: ``\text{New York}`` becomes ``New York``."""
    text = re.sub(r"\\(?:(?:text|math)(?:bf|rm|it|sf|tt|normal)?|mbox)(?![A-Za-z])\s*\{([^{}]*)\}?", r"\1", text)
    text = re.sub(r"\\(?:(?:text|math)(?:bf|rm|it|sf|tt|normal)?|mbox)(?![A-Za-z])\s*\{([^{}]*)\}?", r"\1", text)
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
    r"""Convert Unicode mathematics to LaTeX: ``√2`` to ``\sqrt{2}``, ``x²`` to ``x^{2}``, ``½`` to ``1/2``.

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
    """Replace the word of a large number and the number before it by its value: ``18 million`` by ``18000000``."""

    def value(found: re.Match[str]) -> str:
        factor = _WORD_VALUES[found[3].lower()]
        if found[1] is None:
            return f"\\times {factor}{found[2]}"
        return f"{Decimal(found[1].replace(',', '')) * factor:f}{found[2]}"

    return _NUMBER_WORD.sub(value, text)
