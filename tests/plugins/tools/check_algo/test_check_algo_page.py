"""The page of ``slime check-algo`` has a row for each estimator, with what the command finds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from slime.plugins.tools.check_algo import DESIGN, check_algorithm
from slime.plugins.tools.check_algo.lab import make_args
from slime.registry import parts

ROOT = Path(__file__).resolve().parents[4]
EACH_COMMIT = ("rloo",)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("page", ROOT / "tools" / "check_algo_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(tool: ModuleType) -> dict[str, str]:
    found: dict[str, str] = tool.rows_of(tool.PAGE.read_text(encoding="utf-8"))
    return found


def test_each_estimator_has_a_row_with_its_verdict(tool: ModuleType) -> None:
    found = rows(tool)
    assert list(found) == list(parts("algorithm"))
    assert tool.notes() in tool.PAGE.read_text(encoding="utf-8")
    for name, reasons in DESIGN.items():
        numbers = [f"({tool.REASONS.index(reason) + 1})" for reason in reasons.values()]
        assert all(number in found[name] for number in numbers)
        assert ("| unbiased |" in found[name]) == ("direction" not in reasons)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in EACH_COMMIT else pytest.mark.long)
        for name in parts("algorithm")
    ],
)
def test_its_row_is_what_the_command_finds(tool: ModuleType, name: str) -> None:
    assert rows(tool)[name] == tool.row(check_algorithm(make_args(name)))
