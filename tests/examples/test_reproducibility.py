"""The comparison finds the last bit, and the killer leaves nothing alive."""

from __future__ import annotations

import copy
import json
import math
import sys
from pathlib import Path

import psutil
import pytest
from example_scripts import load_example

same = load_example("reproducibility/same.py")
killed = load_example("reproducibility/killed.py")
ROWS = [
    {"rollout/step": i, "train/loss": 0.1 * i, "rollout/raw_reward": 0.5, "perf/train_time": 1.0}
    for i in range(3)
]


def write(folder: Path, rows: list[dict], texts: dict[str, list[dict]] | None = None) -> Path:
    (folder / "samples").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, samples in (texts or {}).items():
        (folder / "samples" / name).write_text(
            "".join(json.dumps(sample) + "\n" for sample in samples)
        )
    return folder


def compare(one: Path, other: Path) -> list[str]:
    return same.differences(
        same.steps_of(one), same.steps_of(other), same.texts_of(one), same.texts_of(other)
    )


def test_one_bit_of_one_loss_is_found(tmp_path: Path) -> None:
    text = {"index": 0, "response": "12", "reward": 1.0, "weight_versions": ["0.0"]}
    first = write(tmp_path / "a", ROWS, {"rollout_000000.jsonl": [text]})
    rows = copy.deepcopy(ROWS)
    for row in rows:
        row["perf/train_time"] = 2.0
    later = text | {"weight_versions": ["1.0"]}
    assert compare(first, write(tmp_path / "b", rows, {"rollout_000000.jsonl": [later]})) == []
    rows[1]["train/loss"] = math.nextafter(rows[1]["train/loss"], 1.0)
    assert compare(first, write(tmp_path / "c", rows, {"rollout_000000.jsonl": [text]})) == [
        f"step 1: train/loss is 0.1 and {math.nextafter(0.1, 1.0)!r}"
    ]
    other = write(tmp_path / "d", ROWS[:2], {"rollout_000000.jsonl": [text | {"response": "13"}]})
    assert compare(first, other) == [
        "step 2 is in one run only",
        "the samples of rollout_000000 differ",
    ]


def test_what_a_killed_run_started_is_dead_too(tmp_path: Path) -> None:
    due, pid = tmp_path / "due", tmp_path / "pid"
    due.write_text("of an earlier run")
    orphan = "import os, time\np = os.getppid()\nwhile os.getppid() == p:\n    time.sleep(0.05)"
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {orphan!r}])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        f"time.sleep(0.3); open({str(due)!r}, 'w').write('now'); time.sleep(60)\n"
    )
    assert killed.run_and_kill([sys.executable, "-c", code], due, deadline=30) == 2
    assert (
        not psutil.pid_exists(int(pid.read_text()))
        or psutil.Process(int(pid.read_text())).status() == "zombie"
    )


def test_a_run_that_ends_by_itself_was_not_killed(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="ended with 3"):
        killed.run_and_kill([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "due")
