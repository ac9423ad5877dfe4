"""Two runs side by side: the same numbers, or which step differs first."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

KEYS = (
    "rollout/level_max",
    "rollout/level_mean",
    "rollout/raw_reward",
    "train/loss",
    "train/grad_norm",
)


def steps(run: Path) -> dict[int, dict[str, Any]]:
    """The rows of ``metrics.jsonl`` that belong to a training step, by step."""
    rows = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return {int(row["rollout/step"]): row for row in rows if "rollout/step" in row}


def main(straight: Path, resumed: Path) -> int:
    first, second = steps(straight), steps(resumed)
    print("step " + "".join(f"{key:>20}" for key in KEYS))
    for step, row in sorted(first.items()):
        print(f"{step:4} " + "".join(f"{row[key]:20.8g}" for key in KEYS))
    wrong = [
        step
        for step in first
        if any(first[step][key] != second.get(step, {}).get(key) for key in KEYS)
    ]
    if wrong or first.keys() != second.keys():
        print(f"{straight} and {resumed} differ from step {min(wrong, default='?')} on")
        return 1
    print(
        "the run that was stopped and resumed has the same numbers, bit for bit, in all "
        f"{len(first)} steps"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
