"""How old the trained tokens are, and who waited for whom, step by step.

python staleness.py RUN_DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

COLUMNS = {
    "reward": "rollout/raw_reward",
    # updates between the weights that made a token and those that it trains
    "age mean": "rollout/staleness/mean",
    "age max": "rollout/staleness/max",
    "under way": "rollout/under_way_group_count",  # groups that went on while the step was taken
    "waited s": "perf/staleness_wait_time",  # generation stood still at the bound
    "clipped": "train/tis_clipfrac",  # share of tokens whose weight was bounded
    "gap": "train/train_rollout_logprob_abs_diff",
    "step s": "perf/step_time",
}


def table(run_dir: Path) -> list[list[str]]:
    """One row per step; "-" where a run has no such metric."""
    rows = []
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        metrics = json.loads(line)
        if "rollout/step" in metrics:
            found = [metrics.get(key) for key in COLUMNS.values()]
            rows.append(
                [
                    str(int(metrics["rollout/step"])),
                    *("-" if v is None else f"{v:.3f}" for v in found),
                ]
            )
    return rows


if __name__ == "__main__":
    for cells in [["step", *COLUMNS], *table(Path(sys.argv[1]))]:
        print(f"{cells[0]:>4} " + " ".join(f"{cell:>9}" for cell in cells[1:]))
