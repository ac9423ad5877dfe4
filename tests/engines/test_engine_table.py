"""The page of the engines says what the contract suite has found."""

from __future__ import annotations

import re
from pathlib import Path

from test_engine_contract import MAY_SKIP

PAGE = Path(__file__).resolve().parents[2] / "docs" / "en" / "backends.md"


def test_the_table_of_capabilities_is_that_of_the_contract_suite() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`: [^|]+ \| (\w+) \| (\w+) \| (\w+) \|$", text, re.MULTILINE)
    lacking: dict[str, set[str]] = {"embedded": set(), "sglang": set(), "vllm": set()}
    for name, *answers in rows:
        for kind, answer in zip(lacking, answers, strict=True):
            assert answer in ("yes", "no")
            lacking[kind] |= {name} if answer == "no" else set()
    assert len(rows) >= 7 and lacking == MAY_SKIP
