"""The recipes' data, their commands and the table of the page."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from recipe_data import HELD_OUT

ROOT = Path(__file__).resolve().parents[2]
ANSWERS: dict[str, Callable[[list[int]], int]] = {
    " times ": math.prod,
    " + ": sum,
    "buys": sum,
    "gives away": lambda numbers: numbers[0] - numbers[1],
    "largest": max,
}
"""How a question is answered, by words of it."""


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "benchmark_recipes", ROOT / "benchmarks" / "recipes.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_no_held_out_question_is_trained_on(recipes: ModuleType, tmp_path: Path) -> None:
    train, held_out = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in recipes.write_data(tmp_path)
    )
    asked = {row["prompt"][-1]["content"] for row in train}
    assert len(held_out) == HELD_OUT and len(train) > 1000
    assert not asked & {row["prompt"][-1]["content"] for row in held_out}


def test_answers_are_right(recipes: ModuleType, tmp_path: Path) -> None:
    found = set()
    for row in map(json.loads, recipes.write_data(tmp_path)[0].read_text().splitlines()):
        text = row["prompt"][-1]["content"]
        numbers = [int(number) for number in re.findall(r"\d+", text)]
        kind = next(kind for kind in ANSWERS if kind in text)
        assert int(row["label"]) == ANSWERS[kind](numbers), text
        found.add(kind)
    assert found == set(ANSWERS)


def test_the_page_has_the_table_of_its_results(recipes: ModuleType) -> None:
    results = ROOT / "benchmarks" / "results" / "h200_recipes.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    table = recipes.table(rows)
    assert table in (ROOT / "docs" / "en" / "recipes.md").read_text()
    failed = [{**row, "exit_code": 1} for row in rows]
    assert recipes.table(failed).count("\n") == 1
