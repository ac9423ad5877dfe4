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

from slime.plugins.agents.environments import environment

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


def test_a_base_model_reads_solved_examples_and_the_same_questions(
    recipes: ModuleType, tmp_path: Path
) -> None:
    chats, texts = (
        [
            json.loads(line)
            for path in write(tmp_path / write.__name__)
            for line in path.read_text().splitlines()
        ]
        for write in (recipes.write_data, recipes.write_few_shot)
    )
    assert [row["label"] for row in texts] == [row["label"] for row in chats]
    start = texts[0]["prompt"].rsplit("Q: ", 1)[0]
    assert start.startswith("<bos>Q: ") and start.count("\nA: ") == len(ANSWERS)
    held_out = {row["prompt"][-1]["content"] for row in chats[-HELD_OUT:]}
    assert not held_out & set(re.findall("Q: (.*)", start))
    for chat, row in zip(chats, texts, strict=True):
        assert row["prompt"] == f"{start}Q: {chat['prompt'][-1]['content']}\nA:"


def test_rows_of_gsm8k_end_where_the_answer_begins(
    recipes: ModuleType, datasets_dir: Path, tmp_path: Path
) -> None:
    train, held_out = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in recipes.write_gsm8k(tmp_path, datasets_dir / "gsm8k")
    )
    assert len(held_out) == HELD_OUT and len(train) == 7473 - 4
    for row in train + held_out:
        assert row["prompt"].count("The answer is") == 4 and row["prompt"].endswith("\nAnswer:")
        assert re.fullmatch(r"-?[\d.]+", row["label"]) and "<<" not in row["prompt"]


def test_held_out_tasks_of_reasoning_gym_are_scored_by_it(
    recipes: ModuleType, tmp_path: Path
) -> None:
    pytest.importorskip("reasoning_gym")
    rows = [json.loads(line) for line in recipes.write_gym(tmp_path).read_text().splitlines()]
    assert len(rows) == HELD_OUT
    tasks = environment(rows[0]["metadata"]["environment"])
    for row in rows:
        task = tasks.task(row["metadata"]["environment_task"])
        assert row["prompt"] == task.prompt and row["label"] == task.label


def test_a_recipe_without_its_model_is_refused(
    recipes: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["recipes.py", "--model", "m", "--output", "o"]
    monkeypatch.setattr(sys, "argv", words)
    assert {"gemma", "gsm8k"}.isdisjoint(recipes.parse_options().only.split(","))
    monkeypatch.setattr(sys, "argv", [*words, "--gemma", "g", "--only", "grpo,gsm8k"])
    with pytest.raises(SystemExit):
        recipes.parse_options()
    assert "--only gsm8k needs --gsm8k" in capsys.readouterr().err


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
