"""The planner's predictions against every H200 row of benchmarks/results, and the table in the
docs.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow  # the rows simulate some thirty thousand samples

ROOT = Path(__file__).resolve().parents[4]


def tool(name: str = "plan_page") -> ModuleType:
    return _load(name)


@cache  # for the name alone: a default and the same name given are two keys
def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_memory_is_within_a_tenth_and_time_within_a_fifth_of_each_row() -> None:
    rows = [row for row in tool().rows() if not row.outside]
    assert len(rows) > 80
    wrong = [
        f"{row.file}: {row.what}: {row.figure} {row.error:+.1%}"
        for row in rows
        if abs(row.error) > row.tolerance
    ]
    assert not wrong, "\n".join(wrong)


def test_the_measured_modes_are_predicted_in_their_order() -> None:
    found = [row for row in tool().rows() if row.file == "h200_async_two_gpus"]
    assert len(found) == 4
    assert sorted(found, key=lambda row: row.predicted) == sorted(
        found, key=lambda row: row.measured
    )


def test_only_rows_that_give_a_constant_or_have_none_are_outside() -> None:
    """Besides the times of expert kernels that have been replaced, which the table of the docs
    leaves out.
    """
    outside = [row for row in tool().rows() if row.outside]
    old = [row for row in outside if row.outside == tool().OLD_EXPERTS]
    assert len(old) == 12
    assert all("30b-a3b" in row.what and row.figure.startswith("s, ") for row in old)
    assert {row.outside for row in outside if row not in old} == {
        "the only row with Adam on the CPU: it gives the rate",
        tool().OTHER_EXPERTS,
        tool().FLOAT8,
        tool().STATE_ON_CPU,
    }
    assert not [line for line in tool().table() if tool().OLD_EXPERTS in line]


def test_every_measurement_on_h200s_is_in_the_table_or_has_a_reason() -> None:
    text = tool().PAGE.read_text(encoding="utf-8").partition(tool().END)[2]
    reasons = re.findall(r"`(h200_\w+)(…)?`", text)
    known = {row.file for row in tool().rows()}
    files = {path.stem for path in tool().RESULTS.glob("h200_*")}
    named = {
        file
        for file in files
        for name, more in reasons
        if file == name or (more and file.startswith(name))
    }
    missing = files - known - named
    assert not missing, "add rows to tools/plan_page.py, or a reason below the table"
    assert known <= files


@pytest.mark.parametrize("name", ["plan_page", "fits_page"])
def test_the_table_of_the_docs_is_todays(name: str) -> None:
    text = tool(name).PAGE.read_text(encoding="utf-8")
    assert tool(name).page(text) == text, f"run python tools/{name}.py"


def test_what_the_recipes_say_of_larger_models_is_todays() -> None:
    text = tool("fits_page").EXPECTED_PAGE.read_text(encoding="utf-8")
    assert tool("fits_page").expected_page(text) == text, "run python tools/fits_page.py"
