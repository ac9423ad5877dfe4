"""The table of a run, and what the example's flags mean for staleness."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from example_scripts import CLUSTER, EXAMPLES, LAPTOP, dry_run, load_example, parse

from slime.config.rollout import is_fully_async, staleness_bound
from slime.observability.metrics import read_metrics

staleness = load_example("fully_async/staleness.py")


def test_the_table_has_the_steps_and_says_what_a_run_lacks(tmp_path: Path) -> None:
    rows = [
        {"eval/step": 0, "eval/x": 1.0},
        {
            "rollout/step": 0,
            "rollout/raw_reward": 0.25,
            "rollout/staleness/max": 0.0,
            "perf/step_time": 3.5,
        },
        {
            "rollout/step": 1,
            "rollout/raw_reward": 0.5,
            "rollout/staleness/max": 2.0,
            "train/tis_clipfrac": 0.125,
        },
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert staleness.table(tmp_path) == [
        ["0", "0.250", "-", "0.000", "-", "-", "-", "-", "3.500"],
        ["1", "0.500", "-", "2.000", "-", "-", "0.125", "-", "-"],
    ]
    assert len(list(read_metrics(tmp_path / "metrics.jsonl"))) == 3, (
        "the same rows that slime reads"
    )


@pytest.mark.parametrize(("script", "bound"), [("run_cpu.sh", 2), ("run_gpu.sh", 4)])
def test_the_scripts_bound_the_age_of_tokens(
    script: str, bound: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = dry_run(EXAMPLES / "fully_async" / script, tmp_path, datasets=False)
    args = parse(command, LAPTOP if script == "run_cpu.sh" else CLUSTER, monkeypatch)
    assert command.script == "train_async.py" and is_fully_async(args)
    implied = staleness_bound(
        args.async_buffer_size, args.update_weights_interval, args.max_weight_staleness
    )
    assert implied == bound and args.use_tis, "off-policy tokens are corrected by default"
