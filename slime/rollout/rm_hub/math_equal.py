"""Symbolic equality of two answers by math-verify. Runs in verifier processes only: it can take for ever.

math-verify's own time limits use ``signal.alarm``; they are off here, since the pool kills the process.
"""

from __future__ import annotations

from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify


def equal(gold: str, answer: str) -> bool:
    """Whether two bare LaTeX answers mean the same."""
    gold_parsed = _bare(gold)
    return bool(gold_parsed) and bool(verify(gold_parsed, _bare(answer), timeout_seconds=None))


def response_equal(gold: str, response: str) -> bool:
    """Whether the last expression or number in free text means ``gold``."""
    gold_parsed = _bare(gold)
    found = parse(response, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=None)
    return bool(gold_parsed) and bool(verify(gold_parsed, found, timeout_seconds=None))


def _bare(answer: str) -> list[Any]:
    return parse(f"\\boxed{{{answer}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)
