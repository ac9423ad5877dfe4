"""The parts of the estimators benchmark that need no training."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.config.parser import parse_args as parse_train_args
from tests.every_algorithm import ALGORITHMS

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "estimators.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_estimators", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks here
    spec.loader.exec_module(module)
    return module


def write_run(folder: Path, rewards: list[float], value_losses: list[float] | None = None) -> None:
    folder.mkdir(parents=True)
    rows = [{"eval/step": 0, "eval/products": 0.1}]
    for i, reward in enumerate(rewards):
        row = {"rollout/step": i, "rollout/raw_reward": reward, "perf/step_time": 1.0}
        rows.append(row | ({"train/critic-value_loss": value_losses[i]} if value_losses else {}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_estimator_of_the_registry_has_a_run(bench: Any) -> None:
    named = {
        flags.split("--advantage-estimator ")[1].split()[0] for flags in bench.ESTIMATORS.values()
    }
    assert named == set(ALGORITHMS)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_commands_are_ones_that_train_py_takes(
    bench: Any, smollm2: Path, tmp_path: Path, device: str
) -> None:
    from slime.plugins.tools.commands.make_data import make_products

    rows, _ = make_products(tmp_path / "data")
    words = ["--model", str(smollm2), "--output-dir", str(tmp_path), "--device", device]
    args = bench.parse_args(words)
    for estimator in bench.ESTIMATORS:
        parsed = parse_train_args(bench.train_flags(args, bench.Job(estimator, 2), rows))
        assert (
            parsed.num_steps_per_rollout == 2
            and parsed.seed == 2
            and parsed.run_name == f"{estimator}-seed2"
        )


def test_groups_that_a_filter_dropped_count_in_the_reward(bench: Any) -> None:
    row = {"rollout/raw_reward": 0.5, "rollout/dynamic_filter/drop_zero_std_1.0": 3.0,
           "rollout/dynamic_filter/drop_zero_std_0.0": 1.0}  # fmt: skip
    assert bench.over_all_judged(row) == pytest.approx((8 * 0.5 + 3 * 1.0) / 12)


def test_figures_plot_and_what_is_finished(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--plot-only", "--estimators", "grpo,ppo,rloo", "--seeds", "1,2", "--num-rollout", "8"]
    args = bench.parse_args([*words, "--output-dir", str(tmp_path)])
    rising = [0.1, 0.3, 0.3, 0.5, 0.6, 0.7, 0.8, 0.8]
    losses = [0.2, 0.2, 0.18, 0.16, 0.1, 0.1, 0.08, 0.06]
    for seed in (1, 2):
        write_run(tmp_path / "runs" / f"grpo-seed{seed}", rising)
        write_run(tmp_path / "runs" / f"ppo-seed{seed}", rising, losses)
    # not all of its rollouts, and no progress
    write_run(tmp_path / "runs" / "rloo-seed1", [0.2] * 5)
    jobs = [bench.Job(estimator, seed) for seed in args.seeds for estimator in args.estimators]
    assert [job.name for job in jobs if not bench.finished(args, job)] == [
        "rloo-seed1",
        "rloo-seed2",
    ]
    result = bench.report(args, jobs, {"rloo-seed2": "train.py ended with status 1"})
    grpo, ppo, rloo = (result["estimators"][name]["1"] for name in args.estimators)
    assert grpo == {"first": 0.2, "last": 0.8, "learned": True, "rollouts": 8}
    assert ppo["value_loss_falls"] and ppo["value_loss_first_half"] == pytest.approx(0.185)
    assert not rloo["learned"] and "2" not in result["estimators"]["rloo"]
    assert "rloo-seed2: train.py ended" in capsys.readouterr().out
    assert (tmp_path / "estimators.png").stat().st_size > 10_000
    with (tmp_path / "estimators.csv").open() as lines:
        table = list(csv.DictReader(lines))
    assert (
        len(table) == 4 * 8 + 5
        and table[0]["estimator"] == "grpo"
        and table[-1]["value_loss"] in ("", "0.06")
    )


def test_a_run_that_fails_or_hangs_stops_no_other(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes: one that ends well, one with an error, one that sleeps past its deadline."""
    (tmp_path / "train.py").write_text(
        "import sys, time\n"
        "name = sys.argv[sys.argv.index('--run-name') + 1]\n"
        "if name.startswith('gspo'): sys.exit('no such thing')\n"
        "if name.startswith('ppo'): time.sleep(60)\n"
        "import json, pathlib\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--output-dir') + 1]) / name\n"
        "folder.mkdir(parents=True)\n"
        "row = json.dumps({'rollout/step': 0, 'rollout/raw_reward': 0.5})\n"
        "(folder / 'metrics.jsonl').write_text(row)\n"
    )
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    words = [
        "--model",
        str(tmp_path),
        "--estimators",
        "grpo,gspo,ppo",
        "--seeds",
        "1",
        "--num-rollout",
        "1",
    ]
    args = bench.parse_args(
        [*words, "--parallel", "3", "--deadline", "2", "--output-dir", str(tmp_path / "out")]
    )
    jobs = [bench.Job(estimator, 1) for estimator in args.estimators]
    failed = bench.run_all(args, jobs)
    assert set(failed) == {"gspo-seed1", "ppo-seed1"}
    assert "no such thing" in failed["gspo-seed1"] and "after 2 s" in failed["ppo-seed1"]
    assert bench.finished(args, jobs[0])
