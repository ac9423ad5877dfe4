"""Symbolic equality of two answers with math-verify. It can hang, so it may run only in verifier
processes.

The time limits of math-verify use ``signal.alarm``. They are turned off here, because the pool
kills the process.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from slime.plugins.rewards.answers import ends_with_product

_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?!\w)")


def equal(gold: str, answer: str) -> bool:
    """Whether two LaTeX answers (without ``\\boxed``) are mathematically equal."""
    units = not ends_with_product(gold) and not ends_with_product(answer)
    return _verified(_bare(gold, units), _bare(answer, units))


def response_equal(gold: str, response: str) -> bool:
    """Whether the last expression or number in free text is mathematically equal to ``gold``."""
    found = parse(response, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=None)
    return _verified(_bare(gold), found)


def _verified(gold: list[Any], answer: list[Any]) -> bool:
    return bool(gold) and bool(
        verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None)
    )


def _bare(answer: str, units: bool = True) -> list[Any]:
    # otherwise its e would be Euler's number
    answer = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", answer)
    config = LatexExtractionConfig(boxed_match_priority=0)
    config = replace(config, normalization_config=replace(config.normalization_config, units=units))
    return parse(f"\\boxed{{{answer}}}", [config], parsing_timeout=None)
