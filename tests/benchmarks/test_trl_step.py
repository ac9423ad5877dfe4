"""The parts of the TRL benchmark that need neither TRL nor a model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "trl_step.py"


@pytest.fixture(scope="module")
def trl_step() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_trl_step", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_come_from_rows_that_have_them(trl_step: Any) -> None:
    rows = [
        {"rollout/step": 0, "perf/step_time": 9.0, "rollout/raw_reward": 0.2},
        {"train/step": 0, "train/skipped_sample_ratio": 0.25},
        {"rollout/step": 1, "perf/step_time": 5.0, "rollout/raw_reward": 0.3},
        {"rollout/step": 2, "perf/step_time": 6.0, "rollout/raw_reward": None},
    ]
    figures = trl_step.our_figures(rows, warmup=1)
    assert figures["seconds"] == [5.0, 6.0]
    assert figures["rewards"] == [0.2, 0.3] and figures["train/skipped_sample_ratio"] == [0.25]
    with pytest.raises(SystemExit, match="3 rows with perf/step_time"):
        trl_step.our_figures(rows, warmup=3)


def test_both_sides_reward_the_same_answers(trl_step: Any) -> None:
    from types import SimpleNamespace

    from slime.plugins.rewards.simple import last_number_reward

    answers = [
        "3 times 4 is 12.",
        "12",
        "It is 12, not 13",
        "no number",
        "1,234",
        "**12**",
        "3 * 4 = 12\n",
        "-12",
    ]
    theirs = trl_step.last_number_reward(
        [[{"role": "assistant", "content": a}] for a in answers], ["12"] * len(answers)
    )
    ours = [last_number_reward(SimpleNamespace(response=a, label="12", index=0)) for a in answers]
    assert theirs == ours


def test_the_command_is_one_that_train_py_takes(
    trl_step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(
        sys, "argv", ["trl_step.py", "--model", str(tmp_path), "--our-flags=--use-router"]
    )
    args = trl_step.parse_args()
    args.data = tmp_path / "rows.jsonl"
    words = trl_step.our_command(args, "run")
    import dataclasses

    from slime.config.args import Args

    known = {field.name for field in dataclasses.fields(Args)}
    flags = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    assert flags <= known and "use_router" in flags
    monkeypatch.setattr(
        sys, "argv", ["trl_step.py", "--model", str(tmp_path), "--trl-micro-batch", "24"]
    )
    with pytest.raises(SystemExit):
        trl_step.parse_args()
