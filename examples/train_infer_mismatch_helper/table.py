"""The metrics of the corrections side by side, one row per run and step."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLUMNS = {
    "gap": ("train/train_rollout_logprob_abs_diff",),  # mean |trainer - engine|, nats per token
    "k3": ("train/train_rollout_k3",),
    "weight": ("train/tis", "train/mis_weight", "train/gate_weight"),
    # share of tokens whose weight was bounded
    "changed": ("train/tis_clipfrac", "train/mis_tis_changed_frac"),
    "left out": ("train/mis_rejected_frac", "train/gate_dropped_frac"),  # share of tokens
    "loss": ("train/loss",),
    "grad norm": ("train/grad_norm",),
}


def rows(folder: Path, names: Sequence[str]) -> list[list[str]]:
    """Cells of the table: correction, step, then :data:`COLUMNS`; "-" where a correction has no
    such metric.
    """
    table = []
    for name in names:
        for line in (
            (folder / f"mismatch_{name}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ):
            row: dict[str, Any] = json.loads(line)
            if "train/loss" in row:
                found = [
                    next((row[key] for key in keys if key in row), None)
                    for keys in COLUMNS.values()
                ]
                cells = ["-" if value is None else f"{value:.5f}" for value in found]
                table.append([name, str(int(row["rollout/step"])), *cells])
    return table


def main(folder: Path, names: Sequence[str]) -> None:
    for cells in [["correction", "step", *COLUMNS], *rows(folder, names)]:
        print(f"{cells[0]:>10} {cells[1]:>4} " + " ".join(f"{cell:>10}" for cell in cells[2:]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
