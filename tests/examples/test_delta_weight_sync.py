"""The hook on a version that was really written, and the table of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from example_scripts import load_example
from make_args import make_args

from slime.weights.settings import WeightSyncSettings

show = load_example("delta_weight_sync/show.py")


def test_the_hook_counts_what_a_version_takes_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = tmp_path / "delta_v0.1"
    (version / "sub").mkdir(parents=True)
    (version / "a.bin").write_bytes(b"x" * 100)
    (version / "sub" / "b.bin").write_bytes(b"x" * 23)
    hook = f"{show.__file__}:count"
    args = make_args(
        update_weight_disk_dir=str(tmp_path), custom_update_weight_post_write_path=hook
    )
    written = WeightSyncSettings.from_args(args).on_written
    assert written is not None
    written(version, [])
    monkeypatch.setenv("RANK", "1")
    written(version, [])
    lines = (tmp_path / "written.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"version": "delta_v0.1", "files": 2, "bytes": 123}
    ]


def test_the_table_shows_the_updates_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "rollout/step": step,
            "perf/update_weights_wire_bytes": 2e6 * (step + 1),
            "perf/update_weights_density": 0.05,
            "perf/update_weights_pause_time": 0.25,
        }
        for step in range(2)
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in [*rows, {"eval/x": 1}])
    )
    (tmp_path / "written.jsonl").write_text(
        json.dumps({"version": "weight_v0.0", "files": 3, "bytes": 269_000_000})
    )
    show.main(tmp_path, tmp_path)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["weight_v0.0:", "3", "files,", "269.00", "MB"]
    assert [line.split() for line in printed[2:]] == [
        ["0", "2.00", "MB", "5.00%", "0.25", "s"],
        ["1", "4.00", "MB", "5.00%", "0.25", "s"],
    ]
