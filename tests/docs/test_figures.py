"""The figures of releases: the pages are what the script writes of benchmarks/history.jsonl, and a
slower release says why.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
import figures

ROWS = figures.read_history()


def test_the_pages_are_what_the_script_writes() -> None:
    for path, text in figures.pages(ROWS).items():
        between = path.read_text().partition(figures.BEGIN)[2].partition(figures.END)[0]
        assert between.strip() == text, f"{path.name}: run python tools/figures.py"


def test_every_table_of_a_release_is_a_row() -> None:
    results = figures.HISTORY.parent / figures.FILES
    tables = {path.name for path in results.glob("h200_release_*.json")}
    named = [file for row in ROWS for file in row["files"]]
    assert tables <= set(named) and all((results / file).is_file() for file in named)
    for row in ROWS:
        if set(row["files"]) <= tables:
            again = figures.row_of([results / file for file in row["files"]])
            assert {**again, "reason": ""} == {**row, "reason": ""}


def test_no_release_is_slower_without_a_reason() -> None:
    assert not list(figures.unexplained(ROWS))


def release(path: Path, rate: float, commit: str = "abc", **more: Any) -> Path:
    mfu = {figures.RATE: rate, "train_mfu": 0.6, "log_probs_mfu": 0.7, "peak_gib": 100.0}
    mfu |= {"gpus": 1, "flash_attention_4": False} | more
    step = {"times": {"step_seconds": 24.0, "phases": dict.fromkeys(figures.PHASES, 8.0)}}
    step["kilojoules"] = {"steps": [9.0], "median": 9.0}
    parts = {
        "mfu": {"status": "exit 0", "figures": mfu},
        "step": {"status": "exit 0", "figures": step},
    }
    parts["mfu_gpus"] = {"status": "not done in 30 s", "figures": None}
    parts["recipes"] = {"status": "exit 0", "figures": {"recipes": []}}
    table = {"commit": commit, "date": "2026-12-01", "card": "NVIDIA H200", "parts": parts}
    path.write_text(json.dumps(table))
    return path


def test_a_release_is_the_parts_that_have_ended(tmp_path: Path) -> None:
    row = figures.row_of([release(tmp_path / "a.json", 20000.0)])
    assert list(row["parts"]) == ["mfu", "step"] and row["parts"]["step"]["kilojoules"] == 9.0
    shown = "\n".join(figures.pages([*ROWS, row]).values())
    assert "20.0k" in shown and "9.0 kJ" in shown and "abc, 2026-12-01" in shown
    history = figures.HISTORY.with_suffix(".md")
    assert ROWS[-1]["commit"] in figures.pages([*ROWS, row])[history]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rate": 18900.0}, True),
        ({"rate": 19100.0}, False),
        ({"rate": 30000.0}, False),
        ({"rate": 20000.0, "peak_gib": 106.0}, True),
        ({"rate": 15000.0, "gpus": 2}, False),
        ({"rate": 15000.0, "flash_attention_4": True}, False),
    ],
)
def test_a_slower_release_is_told(tmp_path: Path, more: dict[str, Any], said: bool) -> None:
    before = figures.row_of([release(tmp_path / "a.json", 20000.0)])
    after = figures.row_of([release(tmp_path / "b.json", commit="new", **more)])
    assert bool(list(figures.unexplained([before, after]))) == said
    assert not list(figures.unexplained([before, {**after, "card": "NVIDIA H100"}]))
    assert not list(figures.unexplained([before, {**after, "reason": "float32 since then"}]))


def test_tables_of_two_commits_are_no_row(tmp_path: Path) -> None:
    paths = [release(tmp_path / f"{name}.json", 20000.0, commit=name) for name in "ab"]
    with pytest.raises(SystemExit, match="different commits"):
        figures.row_of(paths)
