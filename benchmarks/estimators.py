"""Reward against rollouts for every advantage estimator, on the quickstart's task, several seeds
each.

    python benchmarks/estimators.py                                             # CPU, one run after the other
    python benchmarks/estimators.py --device cuda --gpus 0,1 --parallel 8       # 8 runs side by side

Every run is ``python train.py`` as a process of its own, with its own folder and deadline: one that
fails stops no other, and a second call skips what is finished. All have two optimizer steps a
rollout, so that the second one is off-policy and clips differ. The reward is the mean over all
judged samples, also of groups that DAPO's filter dropped. A run has learned when the mean of its
last quarter lies 0.2 above that of its first two rollouts.

Writes ``estimators.png`` and ``estimators.csv`` to the output folder; the last line is JSON.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
LEARNED_BY = 0.2
STOP_SECONDS = 30.0

ESTIMATORS: dict[str, str] = {
    "grpo": "--advantage-estimator grpo",
    "gspo": "--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4",
    "cispo": "--advantage-estimator cispo --eps-clip 1 --eps-clip-high 2",
    "rloo": "--advantage-estimator rloo",
    "dr_grpo": "--advantage-estimator dr_grpo",
    "dapo": "--advantage-estimator grpo --eps-clip-high 0.28 --calculate-per-token-loss "
    "--overlong-buffer-len 4 --dynamic-sampling-filter-path "
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    "reinforce_plus_plus": "--advantage-estimator reinforce_plus_plus --normalize-advantages",
    "reinforce_plus_plus_baseline": "--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages",
    "ppo": "--advantage-estimator ppo --normalize-advantages --critic-lr 5e-5 --value-clip 0.5",
    "maxrl": "--advantage-estimator maxrl",
    "sapo": "--advantage-estimator sapo",
    "luspo": "--advantage-estimator luspo --eps-clip 3e-4 --eps-clip-high 4e-4",
    "vespo": "--advantage-estimator vespo",
    "k2_5": "--advantage-estimator k2_5 --calculate-per-token-loss",
    "dppo": "--advantage-estimator dppo --use-rollout-logprobs",
    "dppo_k2_5": "--advantage-estimator dppo_k2_5 --use-rollout-logprobs",
    "gdpo": "--advantage-estimator gdpo",
    "gmpo": "--advantage-estimator gmpo",
    "clip_cov": "--advantage-estimator clip_cov",
    "by_source": "--advantage-estimator by_source",
    "kl_cov": "--advantage-estimator kl_cov",
    "otb": "--advantage-estimator otb",
    "rae": "--advantage-estimator rae",
    "vaco": "--advantage-estimator vaco --use-rollout-logprobs",
}
"""What each needs beside the flags of all."""


@dataclass(frozen=True)
class Job:
    estimator: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.estimator}-seed{self.seed}"


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=CHECKOUT / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument(
        "--estimators", default=",".join(ESTIMATORS), help="comma-separated; default: all"
    )
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated (default: 1,2,3)")
    parser.add_argument("--num-rollout", type=int, default=16, help="of each run (default: 16)")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--gpus", default="0", help="comma-separated, with --device cuda (default: 0)"
    )
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument(
        "--deadline", type=float, default=1800, help="seconds of one run (default: 1800)"
    )
    parser.add_argument(
        "--flags", default="", help='more flags for every run: --flags="--train-dtype bfloat16"'
    )
    parser.add_argument(
        "--plot-only", action="store_true", help="draw what is there, start nothing"
    )
    parser.add_argument(
        "--also",
        type=Path,
        help="an estimators.csv of runs made elsewhere: those count as finished",
    )
    parser.add_argument(
        "--output-dir", type=Path, default=CHECKOUT / "outputs" / "benchmarks" / "estimators"
    )
    args = parser.parse_args(words)
    args.estimators = args.estimators.split(",")
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    args.gpus = args.gpus.split(",")
    args.output_dir = args.output_dir.expanduser().resolve()
    unknown = sorted(set(args.estimators) - set(ESTIMATORS))
    if unknown:
        parser.error(f"--estimators {', '.join(unknown)}: known are {', '.join(ESTIMATORS)}")
    if not args.plot_only and not (args.model / "config.json").is_file():
        parser.error(
            f"no model in {args.model}: run `slime fetch-model smollm2-135m-instruct`, or give "
            "--model FOLDER"
        )
    return args


def train_flags(args: argparse.Namespace, job: Job, rows: Path) -> list[str]:
    """The quickstart's flags, two steps a rollout, and the estimator's own."""
    flags = {
        "hf-checkpoint": args.model,
        "prompt-data": rows,
        "rm-type": "last_number",
        "rollout-batch-size": 8,
        "n-samples-per-prompt": 8,
        "num-steps-per-rollout": 2,
        "rollout-max-response-len": 20,
        "num-rollout": args.num_rollout,
        "lr": args.lr,
        "max-tokens-per-gpu": 2048,
        "train-dtype": "float32",
        "train-backend": "fsdp",
        "rollout-backend": "embedded",
        "embedded-max-total-tokens": 16384,
        "seed": job.seed,
        "rollout-seed": job.seed,
        "output-dir": args.output_dir / "runs",
        "run-name": job.name,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    words += ["--apply-chat-template", "--rollout-shuffle", "--use-dynamic-batch-size"]
    if args.device == "cuda":
        words += [
            "--colocate",
            "--no-offload-train",
            "--no-offload-rollout",
            "--actor-num-gpus-per-node",
            "1",
        ]
        words += ["--no-compile-layers"]  # which takes longer than these short runs
    return words + shlex.split(ESTIMATORS[job.estimator]) + shlex.split(args.flags)


# --- running ------------------------------------------------------------------------------------


def run_all(args: argparse.Namespace, jobs: list[Job]) -> dict[str, str]:
    """Run what is not finished, ``--parallel`` at a time. Returns a line for each job that
    failed.
    """
    from slime.plugins.tools.commands.make_data import make_products

    rows = {
        seed: make_products(args.output_dir / f"data-seed{seed}", seed=seed)[0]
        for seed in args.seeds
    }
    slots: SimpleQueue[int] = SimpleQueue()
    for slot in range(args.parallel):
        slots.put(slot)
    failed: dict[str, str] = {}
    running: dict[int, subprocess.Popen[Any]] = {}

    def one(job: Job) -> None:
        slot = slots.get()
        start = time.monotonic()
        problem = run_one(args, job, train_flags(args, job, rows[job.seed]), slot, running)
        slots.put(slot)
        if problem:
            failed[job.name] = problem
        print(f"{job.name}: {problem or 'done'} ({time.monotonic() - start:.0f} s)", flush=True)

    waiting = [job for job in jobs if not finished(args, job)]
    print(
        f"{len(jobs) - len(waiting)} of {len(jobs)} runs are there; {len(waiting)} to go",
        flush=True,
    )
    pool = ThreadPoolExecutor(args.parallel)
    try:
        list(pool.map(one, waiting))
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(running.values()):
            stop(process)
        raise
    return failed


def run_one(
    args: argparse.Namespace,
    job: Job,
    flags: list[str],
    slot: int,
    running: dict[int, subprocess.Popen[Any]],
) -> str | None:
    """One ``train.py``; None, or what went wrong."""
    environment = dict(
        os.environ, PYTHONPATH=os.pathsep.join([str(CHECKOUT), *_entries("PYTHONPATH")])
    )
    if args.device == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = args.gpus[slot % len(args.gpus)]
    threads = max((os.cpu_count() or 1) // args.parallel, 1)
    log = args.output_dir / "logs" / f"{job.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        str(CHECKOUT / "train.py"),
        *flags,
        "--threads-per-process",
        str(threads),
    ]
    time.sleep(0.5 * slot)  # side by side they would all look for the same free ports
    with log.open("w") as out:
        out.write(shlex.join(command) + "\n")
        out.flush()
        process = running[slot] = subprocess.Popen(
            command, cwd=CHECKOUT, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(args.deadline)
        except subprocess.TimeoutExpired:
            stop(process)
            return f"not done after {args.deadline:.0f} s; see {log}"
    if code != 0:
        return f"train.py ended with status {code}: {_last_words(log)}"
    return None if finished(args, job) else f"fewer rollouts than asked for; see {log}"


def stop(process: subprocess.Popen[Any]) -> None:
    """At the first SIGTERM train.py ends its engines and workers in order, at the second at
    once.
    """
    for _ in range(2):
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    process.wait()


def _entries(name: str) -> list[str]:
    return [entry for entry in os.environ.get(name, "").split(os.pathsep) if entry]


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{' / '.join(lines[-3:])[-300:]} ({log})"


# --- figures ------------------------------------------------------------------------------------


def read_run(args: argparse.Namespace, job: Job) -> list[dict[str, float]]:
    """A row per rollout: reward over all judged samples, and the critic's loss beside the rewards'
    variance.
    """
    path = args.output_dir / "runs" / job.name / "metrics.jsonl"
    if not path.is_file():
        return read_csv(args.also, job) if args.also else []
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    figures = []
    for row in rows:
        if "rollout/step" not in row or row.get("rollout/raw_reward") is None:
            continue
        reward = over_all_judged(row)
        figure = {
            "rollout": row["rollout/step"] + 1,
            "reward": reward,
            "seconds": row.get("perf/step_time", 0.0),
        }
        if "train/critic-value_loss" in row:
            figure |= {
                "value_loss": row["train/critic-value_loss"],
                "reward_variance": reward * (1 - reward),
            }
        figures.append(figure)
    return figures


def over_all_judged(row: dict[str, float], kept_groups: int = 8) -> float:
    """``rollout/raw_reward`` is over the groups kept; a dropped one has the reward that its reason
    names.
    """
    pattern = re.compile(r"rollout/dynamic_filter/drop_zero_std_(-?[\d.]+)$")
    dropped = [(float(match[1]), n) for name, n in row.items() if (match := pattern.match(name))]
    total = row["rollout/raw_reward"] * kept_groups + sum(reward * n for reward, n in dropped)
    return total / (kept_groups + sum(n for _, n in dropped))


def finished(args: argparse.Namespace, job: Job) -> bool:
    return len(read_run(args, job)) >= args.num_rollout


def summarize(rows: list[dict[str, float]]) -> dict[str, Any]:
    """First and last reward of a run, and whether it learned."""
    rewards = [row["reward"] for row in rows]
    first, last = (
        statistics.fmean(rewards[:2]),
        statistics.fmean(rewards[-max(len(rewards) // 4, 1) :]),
    )
    result = {
        "first": first,
        "last": last,
        "learned": last - first >= LEARNED_BY,
        "rollouts": len(rows),
    }
    losses = [row["value_loss"] for row in rows if "value_loss" in row]
    if losses:
        half = max(len(losses) // 2, 1)
        result["value_loss_first_half"], result["value_loss_second_half"] = (
            statistics.fmean(losses[:half]),
            statistics.fmean(losses[-half:]),
        )
        result["value_loss_falls"] = (
            result["value_loss_second_half"] < result["value_loss_first_half"]
        )
    return {name: round(x, 4) if isinstance(x, float) else x for name, x in result.items()}


def read_csv(path: Path, job: Job) -> list[dict[str, float]]:
    """The rows of one run that :func:`write_csv` wrote."""
    with path.open(newline="") as file:
        wanted = (job.estimator, str(job.seed))
        rows = [
            row for row in csv.DictReader(file) if (row.pop("estimator"), row.pop("seed")) == wanted
        ]
    return [{name: float(value) for name, value in row.items() if value} for row in rows]


def write_csv(path: Path, runs: dict[Job, list[dict[str, float]]]) -> None:
    names = ("rollout", "reward", "seconds", "value_loss", "reward_variance")
    with path.open("w", newline="") as out:
        writer = csv.DictWriter(out, ["estimator", "seed", *names])
        writer.writeheader()
        for job, rows in runs.items():
            writer.writerows({"estimator": job.estimator, "seed": job.seed, **row} for row in rows)


def draw(path: Path, runs: dict[Job, list[dict[str, float]]], title: str) -> None:
    """One panel per estimator: its seeds thin, their mean thick, GRPO's mean grey; the last: PPO's
    value loss.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves: dict[str, list[list[dict[str, float]]]] = defaultdict(list)
    for job, rows in runs.items():
        curves[job.estimator].append(rows)
    critic = [rows for group in curves.values() for rows in group if "value_loss" in rows[0]]
    panels = len(curves) + bool(critic)
    columns = min(panels, 5)
    lines = -(-panels // columns)
    figure = Figure(figsize=(3.1 * columns, 2.7 * lines + 0.4), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True).flatten()
    for axis, (name, group) in zip(axes, curves.items(), strict=False):
        if name != "grpo" and "grpo" in curves:
            axis.plot(*_mean(curves["grpo"], "reward"), color="0.75", linewidth=2, label="grpo")
        for rows in group:
            axis.plot(
                [row["rollout"] for row in rows],
                [row["reward"] for row in rows],
                color="#4C72B0",
                alpha=0.35,
            )
        axis.plot(
            *_mean(group, "reward"),
            color="#4C72B0",
            linewidth=2.2,
            label=f"{name} ({len(group)} seeds)",
        )
        axis.set(title=name, ylim=(0, 1.05))
        axis.legend(frameon=False, fontsize=7, loc="lower right")
    if critic:
        axis = axes[len(curves)]
        for rows in critic:
            axis.plot(
                [row["rollout"] for row in rows],
                [row["value_loss"] for row in rows],
                color="#C44E52",
                alpha=0.35,
            )
        axis.plot(*_mean(critic, "value_loss"), color="#C44E52", linewidth=2.2, label="value loss")
        axis.plot(
            *_mean(critic, "reward_variance"),
            color="0.6",
            linestyle="--",
            label="variance of the rewards",
        )
        axis.set(title="ppo: value loss", ylim=(0, None))
        axis.legend(frameon=False, fontsize=7)
    for axis in axes[panels:]:
        axis.set_axis_off()
    for axis in axes[:panels]:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("rollouts", fontsize=9)
    figure.supylabel("mean reward", fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, facecolor="white")


def _mean(group: list[list[dict[str, float]]], name: str) -> tuple[list[int], list[float]]:
    length = min(len(rows) for rows in group)
    return list(range(1, length + 1)), [
        statistics.fmean(rows[i][name] for rows in group) for i in range(length)
    ]


def report(args: argparse.Namespace, jobs: list[Job], failed: dict[str, str]) -> dict[str, Any]:
    runs = {job: rows for job in jobs if (rows := read_run(args, job))}
    args.output_dir.mkdir(parents=True, exist_ok=True)
    write_csv(args.output_dir / "estimators.csv", runs)
    result: dict[str, Any] = {
        "benchmark": "estimators",
        "device": args.device,
        "failed": failed,
        "estimators": {},
    }
    print(f"{'estimator':30} {'seed':>4} {'first':>6} {'last':>6}  learned")
    for job, rows in runs.items():
        figures = summarize(rows)
        result["estimators"].setdefault(job.estimator, {})[str(job.seed)] = figures
        print(
            f"{job.estimator:30} {job.seed:4} {figures['first']:6.2f} {figures['last']:6.2f}  "
            f"{'yes' if figures['learned'] else 'NO'}"
            + (
                f"  value loss {figures['value_loss_first_half']:.3f} → "
                f"{figures['value_loss_second_half']:.3f}"
                if "value_loss_falls" in figures
                else ""
            )
        )
    for name, problem in failed.items():
        print(f"{name}: {problem}")
    if runs:
        seeds = len({job.seed for job in runs})
        draw(
            args.output_dir / "estimators.png",
            runs,
            f"products of two digits, {args.model.name}, {seeds} seed(s), 8 prompts × 8 samples, "
            "2 steps a rollout",
        )
    return result


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    args = parse_args()
    jobs = [Job(estimator, seed) for seed in args.seeds for estimator in args.estimators]
    start = time.monotonic()
    try:
        failed = {} if args.plot_only else run_all(args, jobs)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here")
        return 130
    result = report(args, jobs, failed)
    everything = [figures for seeds in result["estimators"].values() for figures in seeds.values()]
    result["all_learned"] = len(everything) == len(jobs) and all(
        figures["learned"] for figures in everything
    )
    result["seconds"] = round(time.monotonic() - start, 1)
    print(json.dumps(result))
    return 0 if result["all_learned"] and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
