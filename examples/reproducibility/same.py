"""Whether runs were the same: every loss, gradient norm and reward bit for bit, every text letter
for letter.

    python examples/reproducibility/same.py outputs/first outputs/second outputs/resumed

Compares each run with the first one and ends with status 1 where anything differs. Times, memory
and weight versions (they count restarts) are not compared.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from slime.observability.metrics import read_metrics
from slime.observability.samples import read_samples, sample_files

COMPARED = ("train/", "rollout/", "eval/")
WHEN_NOT_WHAT = ("cache", "retry")  # metrics of how a rollout was made, not of what came out
SHOWN = 5

Steps = dict[int, dict[str, float]]
Texts = dict[str, list[tuple[Any, ...]]]


def steps_of(run: Path) -> Steps:
    """Metrics by step. JSON keeps every bit of a float64, and a float32 fits into one."""
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "rollout/step" in row]
    return {
        int(row["rollout/step"]): {
            key: value
            for key, value in row.items()
            if key.startswith(COMPARED) and not any(word in key for word in WHEN_NOT_WHAT)
        }
        for row in rows
    }


def texts_of(run: Path) -> Texts:
    """What was sampled: by file of the run's ``samples/``, index, response and reward of each
    sample that it holds (``--log-samples``: by default all)."""
    return {
        name: [(row["index"], row["response"], row["reward"]) for row in read_samples(path)]
        for name, path in sample_files(run).items()
    }


def differences(one: Steps, other: Steps, texts: Texts, other_texts: Texts) -> list[str]:
    """Where two runs differ, a line for each place."""
    found = []
    for step in sorted(one.keys() | other.keys()):
        left, right = one.get(step), other.get(step)
        if left is None or right is None:
            found.append(f"step {step} is in one run only")
            continue
        for key in sorted(left.keys() | right.keys()):
            if left.get(key) != right.get(key):
                found.append(f"step {step}: {key} is {left.get(key)!r} and {right.get(key)!r}")
    for name in sorted(texts.keys() | other_texts.keys()):
        if texts.get(name) != other_texts.get(name):
            found.append(f"the samples of {name} differ")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    first, *others = parser.parse_args().runs
    steps, texts = steps_of(first), texts_of(first)
    if not steps or not others:
        parser.error("name two runs or more that made a step")
    for step, row in steps.items():
        print(
            f"{first.name} step {step}: loss {row['train/loss']!r}, gradient norm "
            f"{row['train/grad_norm']!r}"
        )
    status = 0
    for run in others:
        found = differences(steps, steps_of(run), texts, texts_of(run))
        if found:
            status = 1
            print(
                f"{run.name} differs from {first.name} in {len(found)} places:",
                *found[:SHOWN],
                sep="\n  ",
            )
        else:
            numbers, samples = sum(map(len, steps.values())), sum(map(len, texts.values()))
            print(
                f"{run.name} equals {first.name} bit for bit: {len(steps)} steps, {numbers} "
                f"metrics, {samples} texts"
            )
    return status


if __name__ == "__main__":
    raise SystemExit(main())
