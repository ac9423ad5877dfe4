"""The planner's predictions against every H200 row of benchmarks/results, and the table in the docs."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


@cache
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_page", ROOT / "tools" / "plan_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_page"] = module
    spec.loader.exec_module(module)
    return module


def test_memory_is_within_a_tenth_and_time_within_a_fifth_of_each_row() -> None:
    rows = [row for row in tool().rows() if not row.outside]
    assert len(rows) > 80
    wrong = [f"{row.file}: {row.what}: {row.figure} {row.error:+.1%}" for row in rows if abs(row.error) > row.tolerance]
    assert not wrong, "\n".join(wrong)


def test_the_measured_modes_are_predicted_in_their_order() -> None:
    found = [row for row in tool().rows() if row.file == "h200_async_two_gpus"]
    assert len(found) == 4
    assert sorted(found, key=lambda row: row.predicted) == sorted(found, key=lambda row: row.measured)


def test_only_rows_of_replaced_code_and_the_row_that_gives_its_own_constant_are_outside() -> None:
    reasons = [row.outside for row in tool().rows() if row.outside]
    assert len(reasons) <= 13
    assert {reason for reason in reasons if reason != tool().OLD_EXPERTS} == {
        "the only row with Adam on the CPU: it gives the rate"
    }


def test_the_table_of_the_docs_is_todays() -> None:
    text = tool().PAGE.read_text(encoding="utf-8")
    assert tool().page(text) == text, "run python tools/plan_page.py"
