r"""Compare two mathematical answers by normal form and by value, without a symbolic parser."""

from __future__ import annotations

import re

from slime.rollout.rm_hub.text import as_number, normalize_math, without_unit

_LONGEST_ANSWER = 500  # characters; a longer "answer" is a derivation and counts as wrong
_STYLED = re.compile(r"\\(?:text|textbf|mathbf|mathrm|textit)\s*\{([^{}]*)\}")
_BASE_TEN = re.compile(r"(?<=[0-9])_(?:\{(?:10|ten)\}|10\b)")
_BASE = re.compile(r"[0-9A-Fa-f]_\{?(\d+|two|eight|sixteen)\}?\s*$")


def decide(gold: str, answer: str) -> bool | None:
    """Compare two answers. None if only a symbolic comparison can decide.

    A number with a base (``11_2``) equals only the same digits with the same base.
    """
    if not answer or len(answer) > max(_LONGEST_ANSWER, 2 * len(gold)):
        return False
    return same_answer(gold, answer)


def same_answer(gold: str, answer: str) -> bool | None:
    """Compare two answers by normal form and as numbers. None if only a symbolic comparison can decide."""
    gold, answer = _BASE_TEN.sub("", gold), _BASE_TEN.sub("", answer)
    normal = normalize_math(gold)
    if normal and normal == normalize_math(answer):
        return True
    if _BASE.search(gold.strip("$ ")) or _BASE.search(answer.strip("$ ")):
        return _braced(gold) == _braced(answer)  # math-verify would ignore the base
    gold_value, value = as_number(_bare(gold)), as_number(without_unit(_bare(answer)))
    if gold_value is not None and value is not None:
        return gold_value == value
    return None


def _braced(number: str) -> str:
    return re.sub(r"_\{?(\w+)\}?$", r"_{\1}", normalize_math(number))


def _bare(answer: str) -> str:
    """Remove style commands and parentheses around a number, as in ``\\textbf{(073)}``."""
    styled = _STYLED.fullmatch(answer.strip())
    answer = styled[1].strip() if styled else answer.strip()
    return answer[1:-1] if answer.startswith("(") and answer.endswith(")") else answer
