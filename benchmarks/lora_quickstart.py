"""The quickstart's task with an adapter beside full training: learning, seconds, and the memory of
the trainer.

    python benchmarks/lora_quickstart.py --seeds 1,2,3                    # an adapter of rank 16
    python benchmarks/lora_quickstart.py --seeds 1 --rank 0               # all weights, for the comparison

Each run is ``python train.py`` with the flags of the quickstart. The seconds of each phase are
wall-clock times of the run; ``train_rank_cpu_seconds`` is the CPU time of the training process,
which other load on the machine changes less. The memory is the largest resident set of the training
process, sampled four times a second; ``train_rank_by_phase`` has both for the phases of the driver
that the run's trace files contain, and ``start`` for everything before the first. The last line
that each run prints, and one file per run in the output folder, is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from run_processes import MARK, of_role

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT / "scripts" / "quickstart"))
from run import RUN, train_flags  # noqa: E402  # the quickstart's own flags

from slime.plugins.tools.commands.make_data import make_products  # noqa: E402
from slime.plugins.tools.summary import read_trace  # noqa: E402


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=CHECKOUT / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated (default: 1,2,3)")
    parser.add_argument(
        "--rank", type=int, default=16, help="of the adapter; 0 for full training (default: 16)"
    )
    parser.add_argument(
        "--lr", type=float, help="default: 1e-4 with an adapter, 1e-5 for full training"
    )
    parser.add_argument("--num-rollout", type=int, default=12)
    parser.add_argument("--flags", default="", help='more flags: --flags="--train-dtype bfloat16"')
    parser.add_argument(
        "--output-dir", type=Path, default=CHECKOUT / "outputs" / "benchmarks" / "lora"
    )
    return parser.parse_args()


def run_one(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Make one run and return its results."""
    folder = args.output_dir / f"rank{args.rank}-seed{seed}"
    lr = args.lr or (1e-4 if args.rank else 1e-5)
    train, held_out = make_products(args.output_dir / "data" / f"products-seed{seed}", seed=seed)
    own = argparse.Namespace(seed=seed, num_rollout=args.num_rollout, output_dir=folder)
    words = [
        *train_flags(own, args.model, train, held_out),
        "--lr",
        str(lr),
        "--lora-rank",
        str(args.rank),
    ]
    words += args.flags.split()
    mark = uuid.uuid4().hex
    started = time.monotonic()
    seen: list[Seen] = []
    process = subprocess.Popen(
        [sys.executable, "train.py", *words],
        cwd=CHECKOUT,
        env={**os.environ, MARK: mark},
        stdout=subprocess.DEVNULL,
    )
    while process.poll() is None:
        for rank in of_role(mark, "rank"):
            try:
                times = rank.cpu_times()
                seen.append(Seen(time.time(), rank.memory_info().rss, times.user + times.system))
            except psutil.Error:
                continue
        time.sleep(0.25)
    if process.returncode:
        raise SystemExit(
            f"the run of seed {seed} ended with status {process.returncode}: see "
            f"{folder / RUN / 'logs'}"
        )
    summary = json.loads((folder / RUN / "summary.json").read_text(encoding="utf-8"))
    chosen = (
        "num_rollouts",
        "accuracy_before",
        "accuracy_after",
        "reward_per_rollout",
        "seconds_per_phase",
    )
    return {
        "lora_rank": args.rank,
        "seed": seed,
        "lr": lr,
        **{name: summary[name] for name in chosen},
        "seconds_total": round(time.monotonic() - started, 2),
        "train_rank_cpu_seconds": round(max(one.cpu for one in seen), 1),
        "train_rank_peak_gib": round(max(one.rss for one in seen) / 2**30, 3),
        "train_rank_by_phase": by_phase(seen, folder / RUN),
    }


class Seen(NamedTuple):
    """The training process at a moment."""

    time: float
    """Wall time in seconds."""
    rss: int
    """Resident memory in bytes."""
    cpu: float
    """CPU seconds since it started."""


def by_phase(seen: list[Seen], run: Path) -> dict[str, dict[str, float]]:
    """Return the wall and CPU seconds and the largest resident set of the training process by phase
    of the driver.
    """
    paths = sorted((run / "traces").glob("rollout_*.json.gz"))
    events = [event for path in paths for event in read_trace(path) if event["ph"] == "X"]
    of_driver = [event for event in events if event["pid"] == event["tid"] == 0]
    spans = {(event["name"], event["ts"], event["dur"]) for event in of_driver}
    phases = [(name, ts / 1e6, (ts + dur) / 1e6) for name, ts, dur in spans]
    phases.append(("start", 0.0, min(begin for _, begin, _ in phases)))
    found: dict[str, dict[str, float]] = {}
    for name, begin, end in sorted(phases, key=lambda phase: phase[1]):
        inside = [one for one in seen if begin <= one.time <= end]
        if not inside:
            continue
        before = [one for one in seen if one.time < begin] or [Seen(begin, 0, 0.0)]
        row = found.setdefault(name, {"seconds": 0.0, "cpu_seconds": 0.0, "peak_gib": 0.0})
        row["seconds"] = round(row["seconds"] + end - max(begin, seen[0].time), 2)
        row["cpu_seconds"] = round(row["cpu_seconds"] + inside[-1].cpu - before[-1].cpu, 2)
        row["peak_gib"] = max(row["peak_gib"], round(max(one.rss for one in inside) / 2**30, 3))
    return found


def main() -> None:
    args = parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for seed in map(int, args.seeds.split(",")):
        found = run_one(args, seed)
        name = (
            f"quickstart_lora{args.rank}_seed{seed}.json"
            if args.rank
            else f"quickstart_full_seed{seed}.json"
        )
        (args.output_dir / name).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
