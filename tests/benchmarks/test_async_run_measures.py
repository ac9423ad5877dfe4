"""What the benchmark of asynchronous training makes of the files that runs leave."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "async_run.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_async_run", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def event(name: str, start: float, end: float) -> dict[str, object]:
    return {"ph": "X", "name": name, "ts": start * 1e6, "dur": (end - start) * 1e6}


def test_overlap_is_the_share_of_training_in_which_engines_generate(
    bench: ModuleType, tmp_path: Path
) -> None:
    """Training from 10 to 20 and from 30 to 40; answers cover 5-13, 12-15 and 38-50: 7 of 20
    seconds.
    """
    first = [
        event("sglang_generate", 5, 13),
        event("sglang_generate", 12, 15),
        event("train", 10, 20),
    ]
    second = [
        event("train", 10, 20),
        event("train", 30, 40),
        event("sglang_generate", 38, 50),
        {"ph": "M", "name": "x"},
    ]
    for number, events in enumerate((first, second)):
        with gzip.open(tmp_path / f"rollout_{number}.json.gz", "wt") as file:
            json.dump({"traceEvents": events}, file)
    generating, training = bench.intervals(tmp_path)
    assert training == [(10, 20), (30, 40)], "a phase that two files have counts once"
    assert generating == [(5, 15), (38, 50)]
    assert bench.overlap(training, generating) == pytest.approx(7 / 20)


def test_a_step_is_timed_without_the_first_two_and_the_last_five(bench: ModuleType) -> None:
    """The ends that count: 110, 113 and 117."""
    ends = [100, 110, 113, 117, 118, 119, 120, 121, 122]
    assert bench.steady_step_seconds([(end - 1, end) for end in ends]) == pytest.approx(3.5)
    assert bench.steady_step_seconds([(3, 5), (5, 9)]) == 4.0, "of a short run, all"


def row(kind: str, late: float, seconds: float = 10.0, versions: int = 4) -> dict[str, object]:
    by_version = {v: (late if v else 0.1, 8) for v in range(versions)}
    return {"kind": kind, "by_version": by_version, "seconds": seconds, "step_seconds": seconds / 4}


def test_an_asynchronous_run_is_held_to_the_spread_of_the_synchronous_seeds(
    bench: ModuleType,
) -> None:
    sync = [row("sync", 0.6), row("sync", 0.7, 11.0), row("sync", 0.64)]
    rows = [
        *sync,
        row("one-step", 0.56, 8.0, versions=3),
        row("fully-async", 0.75, 5.0, versions=2),
    ]
    verdict = bench.judge(rows)
    assert [r["late_reward"] for r in rows] == [0.6, 0.7, 0.64, 0.56, 0.75]
    assert verdict["within_spread"] and verdict["sync_reward_spread"] == [0.6, 0.7]
    assert verdict["wall_time_over_sync"] == {"one-step": 0.8, "fully-async": 0.5}
    assert verdict["steady_step_over_sync"] == {"one-step": 0.8, "fully-async": 0.5}
    assert not bench.judge([*sync, row("one-step", 0.54), row("fully-async", 0.7)])["within_spread"]


def test_a_version_weighs_as_much_as_the_answers_it_ended(bench: ModuleType) -> None:
    rows = [row("sync", 0.9), row("one-step", 0.9)]
    rows[1]["by_version"] = {0: (0.1, 8), 1: (0.9, 8), 2: (0.9, 15), 3: (0.0, 1)}
    assert bench.judge(rows)["within_spread"] is False
    assert rows[1]["late_reward"] == pytest.approx(0.9 * 15 / 16, abs=1e-3)


def test_rewards_belong_to_the_weights_that_made_them(bench: ModuleType, tmp_path: Path) -> None:
    made = [[("0.0", 0.0), ("0.0", 1.0)], [("0.0", 1.0), ("0.1", 1.0)], [("0.1", 0.0)]]
    folder = tmp_path / "samples"
    folder.mkdir()
    for number, samples in enumerate(made):
        lines = [
            json.dumps({"weight_versions": ["0.0", version], "reward": reward})
            for version, reward in samples
        ]
        (folder / f"rollout_{number:06d}.jsonl").write_text("\n".join(lines) + "\n")
    assert bench.reward_by_version(tmp_path) == {0: (0.667, 3), 1: (0.5, 2)}
