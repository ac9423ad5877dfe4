"""Which mode is faster, and lengths of a finished run."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp
from pathlib import Path
from statistics import fmean

import pytest
from plan_shapes import DENSE, read

from slime.cli.main import main
from slime.config.layout import ParallelLayout
from slime.config.machine import Machine
from slime.config.parser import read_command_line
from slime.config.resolve import resolve_defaults
from slime.config.rules import Run as RunOfFlags
from slime.plugins.tools.plan.layouts import SAMPLES, Way, setting, ways
from slime.plugins.tools.plan.plan import Plan, Run, make_plan
from slime.plugins.tools.plan.seconds import measured_lengths, response_lengths
from slime.plugins.tools.plan.setups import KINDS, EngineSetup, Placement, TrainSetup, Workload
from slime.plugins.tools.plan.simulation import SYNCHRONOUS

WORDS = [
    "plan", "--train-backend", "fsdp", "--rollout-backend", "sglang", "--colocate", "--actor-num-gpus-per-node", "2",
    "--rm-type", "random", "--num-rollout", "4", "--layouts", "1", "--rollout-batch-size", "8",
    "--n-samples-per-prompt", "2", "--rollout-max-response-len", "4000",
]  # fmt: skip


def a_plan(folder: Path, work: Workload, engines: int = 1) -> Plan:
    train = TrainSetup("fsdp", ParallelLayout(world_size=2))
    return make_plan(
        Run(read(folder, DENSE), KINDS["h200"], train, EngineSetup(engines), Placement(), work)
    )


def fastest(found: list[Way], start: str) -> Way:
    return next(way for way in found if way.mode.name.startswith(start))


def test_with_a_long_tail_a_standing_pool_is_faster_and_its_flags_are_those_of_a_run(
    tmp_path: Path,
) -> None:
    found = ways(a_plan(tmp_path, Workload(16, 4, 100, 1000.0, 8000, sigma=1.0)), 4)
    assert [way.step for way in found] == sorted(way.step for way in found)
    pool, one_step = fastest(found, "fully"), fastest(found, "one-step")
    synchronous = fastest(found, "synchronous")
    assert found[0] is pool and pool.step < 0.8 * one_step.step
    assert (
        synchronous.mode is SYNCHRONOUS
        and synchronous.staleness == 0
        and synchronous.plan.run.place.colocate
    )
    assert one_step.staleness == 1 and one_step.engine_gpus < 4
    for way in found:
        assert 0 < way.busy <= 1.001 and way.share == 1
        words = [
            "--rollout-backend",
            "sglang",
            "--rm-type",
            "random",
            "--num-rollout",
            "4",
            "--n-samples-per-prompt",
        ]
        words += ["4", "--rollout-batch-size", "16", "--hf-checkpoint", str(tmp_path)]
        args, problems = read_command_line([*words, *" ".join(way.flags).split()])
        problems += resolve_defaults(
            RunOfFlags(args, way.program == "train_async.py", Machine(8, 16, False))
        )
        assert not problems
        assert args.world_size + (0 if args.colocate else args.rollout_num_gpus) == 4


def test_where_the_trainer_is_slower_a_pool_gains_little_over_one_step(tmp_path: Path) -> None:
    found = ways(
        a_plan(tmp_path, Workload(16, 4, 4000, 50.0, 100, sigma=0.2, shared_prompts=False)), 2
    )
    assert fastest(found, "fully").step > 0.9 * fastest(found, "one-step").step
    assert fastest(found, "fully").busy > 0.9


def test_thousands_of_gpus_are_simulated_with_a_share_of_samples_and_engines(
    tmp_path: Path,
) -> None:
    plan = a_plan(tmp_path, Workload(4096, 8, 100, 1000.0, 8000, sigma=1.0), engines=2048)
    made, share = setting(plan, SYNCHRONOUS)
    assert share == 1 / 32 and made.engines == 64 and made.batch * made.samples == SAMPLES


def test_lengths_of_a_run_replace_the_distribution(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "samples"
    folder.mkdir(parents=True)
    for step, lengths in enumerate(([10, 20, 900], [30, 40, 0])):
        rows = "".join(json.dumps({"response_length": length}) + "\n" for length in lengths)
        (folder / f"rollout_{step:06d}.jsonl").write_text(rows)
    (folder / "eval-test_000000.jsonl").write_text('{"response_length": 7777}\n')
    lengths = measured_lengths(tmp_path / "run")
    assert lengths == (1, 10, 20, 30, 40, 900)
    work = Workload(response_tokens=fmean(lengths), lengths=lengths)
    assert sorted(response_lengths(work, 12)) == [1, 1, 10, 10, 20, 20, 30, 30, 40, 40, 900, 900]
    assert work.squares > replace(work, lengths=(100, 100)).squares == 1.0


def test_the_command_compares_modes_once_it_knows_the_tail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(tmp_path, DENSE | {"model_type": "qwen3"})
    words = [*WORDS, "--hf-checkpoint", str(tmp_path)]
    main(words)
    assert "add --sigma" in capsys.readouterr().out
    main([*words, "--sigma", "1", "--median-response", "500"])
    page = capsys.readouterr().out
    assert "for train_async.py" in page and "--async-buffer-size" in page
    main([*words, "--sigma", "1", "--mean-response", str(500 * exp(0.5)), "--json"])
    modes = json.loads(capsys.readouterr().out)["modes"]
    assert f"{modes[0]['step_seconds']:.2f}" in page, "the same distribution by its mean"

    assert main([*words, "--lengths-from", str(tmp_path / "none")]) == 1
    assert "--lengths-from" in capsys.readouterr().err
    (tmp_path / "run" / "samples").mkdir(parents=True)
    for name, content in (
        ("0.jsonl", b"{}\n"),
        ("0.jsonl", b'{"response_length": null}\n'),
        ("1.jsonl.zst", b"x"),
    ):
        (damaged := tmp_path / "run" / "samples" / f"rollout_00000{name}").write_bytes(content)
        assert main([*words, "--lengths-from", str(tmp_path / "run")]) == 1
        assert f"{damaged} " in capsys.readouterr().err
        damaged.unlink()
    (tmp_path / "run" / "samples" / "rollout_000000.jsonl").write_text('{"response_length": 640}\n')
    main([*words, "--lengths-from", str(tmp_path / "run"), "--json"])
    assert json.loads(capsys.readouterr().out)["modes"]
    assert main([*words, "--lengths-from", str(tmp_path / "run"), "--sigma", "1"]) == 1
    assert "--sigma" in capsys.readouterr().err
