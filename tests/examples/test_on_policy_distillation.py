"""What the comparison of distillation runs says, and that both ways to ask the teacher are the same
run otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from example_scripts import EXAMPLES, LAPTOP, dry_run, load_example, parse

compare = load_example("on_policy_distillation/compare.py")


def write(folder: Path, values: list[float]) -> Path:
    folder.mkdir()
    rows = [{"rollout/step": i, "time": 0.0, compare.KEY: value} for i, value in enumerate(values)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_run_has_to_fall(tmp_path: Path) -> None:
    runs = {
        "engine": write(tmp_path / "a", [0.5, 0.3, 0.2]),
        "trainer": write(tmp_path / "b", [0.5001, 0.3, 0.25]),
    }
    lines, fell = compare.report({name: compare.reverse_kl(run) for name, run in runs.items()})
    assert fell and "differ by 1.0e-04" in "\n".join(lines) and "0.500 → 0.200" in "\n".join(lines)
    assert not compare.report({"engine": [0.5, 0.4], "trainer": [0.5, 0.6]})[1]
    with pytest.raises(ValueError, match="1 steps"):
        compare.reverse_kl(write(tmp_path / "c", [0.1]))


def test_the_two_runs_differ_in_where_the_teacher_is_and_in_nothing_else(
    tmp_path: Path, monkeypatch
) -> None:
    commands = dry_run(EXAMPLES / "on_policy_distillation" / "run_cpu.sh", tmp_path)
    teacher, engine, trainer = (parse(command, LAPTOP, monkeypatch) for command in commands)
    assert teacher.loss_type == "sft_loss" and teacher.save_hf and teacher.debug_train_only
    assert (
        engine.opd_type == "sglang"
        and engine.rm_url.endswith("/generate")
        and trainer.opd_type == "megatron"
    )
    named = {"opd_type", "rm_url", "opd_teacher_load", "run_name"}
    differ = {name for name, value in vars(engine).items() if value != getattr(trainer, name)}
    assert differ - {"explicit", "notices", "argv"} == named
