"""The command lines of ``benchmarks/train_during_rollout.py``: they differ in what is compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import train_during_rollout
import verl_step


def words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cell: str) -> list[str]:
    argv = ["train_during_rollout.py", "--tiny", "--device", "cpu", "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    args = train_during_rollout.work(train_during_rollout.parse_args(), cell, "0,1")
    assert args.gpu == ("0,1" if cell.startswith("apart") else "0")
    own = args.output_dir.name
    return [word.replace(own, "run") for word in verl_step.our_command(args)]


def test_a_cell_is_a_placement_and_a_number_of_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = words(monkeypatch, tmp_path, "colocated:1")
    assert {"--colocate", "--no-offload-train", "--no-offload-rollout"} <= {*plain}
    parts = words(monkeypatch, tmp_path, "colocated:8")
    at = plain.index("--train-during-rollout") + 1
    assert (plain[at], parts[at]) == ("1", "8")
    assert plain[:at] + plain[at + 1 :] == parts[:at] + parts[at + 1 :]
    apart = words(monkeypatch, tmp_path, "apart:8")
    assert "--colocate" not in apart
    assert apart[apart.index("--rollout-num-gpus") + 1] == "1"
