"""Symbolic equality of two answers with math-verify. It can hang, so it may run only in verifier processes.

The time limits of math-verify use ``signal.alarm``. They are turned off here, because the pool kills the process.
"""

from __future__ import annotations

import re
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?!\w)")


def equal(gold: str, answer: str) -> bool:
    """Whether two LaTeX answers (without ``\\boxed``) are mathematically equal."""
    gold_parsed = _bare(gold)
    return bool(gold_parsed) and bool(verify(gold_parsed, _bare(answer), timeout_seconds=None))


def response_equal(gold: str, response: str) -> bool:
    """Whether the last expression or number in free text is mathematically equal to ``gold``."""
    gold_parsed = _bare(gold)
    found = parse(response, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=None)
    return bool(gold_parsed) and bool(verify(gold_parsed, found, timeout_seconds=None))


def _bare(answer: str) -> list[Any]:
    answer = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", answer)  # otherwise its e would be Euler's number
    return parse(f"\\boxed{{{answer}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)
