"""Flags of the Megatron backend that need one another."""

from __future__ import annotations

import pytest
from config_parts import Workplace


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--end-weight-decay 0.2", "a weight decay that changes need --weight-decay-incr-style"),
        ("--weight-decay-incr-style linear", "needs --start-weight-decay or --end-weight-decay"),
        ("--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.2", None),
        ("--start-weight-decay 0.1 --end-weight-decay 0.1", None),
        ("", None),
    ],
)
def test_a_weight_decay_that_changes(flags: str, problem: str | None, workplace: Workplace) -> None:
    line = f"--train-backend megatron --weight-decay 0.1 {flags}"
    found = [text for text in workplace.problems(line) if "weight-decay" in text]
    assert problem in found[0] if problem else not found
