"""The reverse KL of distillation runs, step by step, side by side.

    python examples/on_policy_distillation/compare.py outputs/opd_engine outputs/opd_trainer

Ends with status 1 when a run's reverse KL did not fall. Before its first step every run has the
same student and teacher, so how far their first values lie apart is how exactly the two ways to ask
a teacher agree.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from slime.observability.metrics import read_metrics

KEY = "train/opd_reverse_kl"


def reverse_kl(run: Path) -> list[float]:
    """Nats per token of each step of a run.

    Raises:
        ValueError: it was no distillation.
    """
    values = [row[KEY] for row in read_metrics(run / "metrics.jsonl") if KEY in row]
    if len(values) < 2:
        raise ValueError(
            f"{run} has {len(values)} steps with {KEY}: two are needed to tell whether it falls"
        )
    return values


def report(curves: dict[str, list[float]]) -> tuple[list[str], bool]:
    """Lines to print, and whether every curve fell."""
    lines = ["step  " + "  ".join(f"{name:>12}" for name in curves)]
    for step, row in enumerate(zip(*curves.values(), strict=False)):
        lines.append(f"{step:4d}  " + "  ".join(f"{value:12.4f}" for value in row))
    first = [values[0] for values in curves.values()]
    lines.append(f"first values differ by {max(first) - min(first):.1e} nats per token")
    fell = True
    for name, values in curves.items():
        lines.append(f"{name}: reverse KL to the teacher {values[0]:.3f} → {values[-1]:.3f}")
        fell = fell and values[-1] < values[0]
    return lines, fell


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    args = parser.parse_args()
    lines, fell = report({run.name: reverse_kl(run) for run in args.runs})
    print("\n".join(lines))
    return 0 if fell else 1


if __name__ == "__main__":
    raise SystemExit(main())
