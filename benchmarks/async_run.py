"""Synchronous, one-step off-policy and fully asynchronous training on the quickstart's task,
measured.

    python benchmarks/async_run.py                                   # CPU: overlap adds no compute there
    python benchmarks/async_run.py --device cuda --tail 192 --model MODEL --seeds 1  # trainer and engine on a GPU each
    python benchmarks/async_run.py --device cuda --gpus 0,1 2,3 --tail 192 --model MODEL --seeds 1  # two runs at a time
    python benchmarks/async_run.py --device cuda --one-gpu --tail 192 --model MODEL --seeds 1  # both on the same

Every run is a process of its own: the synchronous loop with each of ``--seeds``, then
``train_async.py`` with the first seed, once with ``--async-buffer-size 1`` and once with the
standing pool of groups, through which updates go. Compared are, from traces and samples: wall time
from the first request to the end of the last step; the share of training time in which the engines
generated too; staleness; and the reward at equal samples, which is that of the weights that as many
steps had trained (a rollout that is generated ahead shows the reward of older weights): its mean
over all answers of the later half of the versions that all runs have should lie within the spread
of the synchronous seeds.

``--tail MEDIAN`` measures time instead: 64 groups of 8 answers a step whose lengths are log-normal
(sigma 1, cut at 16 medians), with random rewards, which are not compared. The seconds of a step are
without the first two (starts, compilation) and the last five, for which asynchronous runs have
generated early.

A second call skips runs that are there. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from slime.observability.metrics import read_metrics
from slime.observability.samples import read_samples, sample_files
from slime.plugins.tools.summary import read_trace

CHECKOUT = Path(__file__).resolve().parents[1]
POOL = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
KINDS = {
    "sync": ("train.py", ""),
    "one-step": ("train_async.py", "--async-buffer-size 1"),
    "fully-async": ("train_async.py", f"--async-buffer-size 2 --rollout-function-path {POOL}"),
    **{
        f"fully-async-{size}-2": (
            "train_async.py",
            f"--async-buffer-size {size} --update-weights-interval 2 --rollout-function-path "
            f"{POOL}",
        )
        for size in (4, 6)
    },
}
QUICKSTART = """
    --rm-type last_number --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 20 --lr 1e-5
    --max-tokens-per-gpu 2048 --rollout-backend embedded --train-dtype float32
"""
LONG_TAIL = f"""
    --rm-type random --rollout-batch-size 64 --n-samples-per-prompt 8 --lr 1e-6 --max-tokens-per-gpu 16384
    --no-skip-zero-advantage-groups --custom-generate-function-path {CHECKOUT / "benchmarks" / "long_tail.py"}:generate
"""
FIRST_STEPS, LAST_STEPS = 2, 5
Interval = tuple[float, float]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=CHECKOUT / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--seeds", default="1,2,3", help="of the synchronous runs (default: 1,2,3)")
    parser.add_argument(
        "--kinds",
        default="sync,one-step,fully-async",
        help=f"of {', '.join(KINDS)} (default: %(default)s)",
    )
    parser.add_argument("--num-rollout", type=int, default=8, help="steps of each run (default: 8)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--gpus",
        nargs="+",
        metavar="A,B",
        help="GPUs of a run; with several such sets as many runs at once",
    )
    parser.add_argument(
        "--one-gpu", action="store_true", help="Ray counts the one GPU twice: both sides share it"
    )
    parser.add_argument(
        "--deadline", type=float, default=1200, help="seconds of one run (default: 1200)"
    )
    parser.add_argument(
        "--tail", type=int, metavar="MEDIAN", help="answers with a long tail of lengths, in tokens"
    )
    parser.add_argument(
        "--flags", default="", help='more flags for every run: --flags="--train-dtype bfloat16"'
    )
    parser.add_argument(
        "--output-dir", type=Path, default=CHECKOUT / "outputs" / "benchmarks" / "async_run"
    )
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        parser.error(
            f"no model in {args.model}: run `slime fetch-model smollm2-135m-instruct`, or give "
            "--model FOLDER"
        )
    args.kinds = args.kinds.split(",")
    if "sync" not in args.kinds or not KINDS.keys() >= set(args.kinds):
        parser.error(f"--kinds needs sync, and others of {', '.join(KINDS)}")
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    args.output_dir = args.output_dir.expanduser().resolve()
    return args


def main() -> int:
    args = parse_args()
    if args.one_gpu:
        count_the_gpu_twice()
    runs = [
        *((kind, args.seeds[0]) for kind in args.kinds),
        *(("sync", seed) for seed in args.seeds[1:]),
    ]
    free: Queue[str | None] = Queue()  # the sets of GPUs that no run has
    for gpus in args.gpus or [None]:
        free.put(gpus)
    with ThreadPoolExecutor(free.qsize()) as pool:
        problems = list(pool.map(lambda run: finish(args, run[0], run[1], free), runs))
    if any(problems):
        print("\n".join(filter(None, problems)), file=sys.stderr)
        return 1
    rows: list[dict[str, Any]] = [
        {"kind": k, "seed": s, **measure(run_folder(args, k, s))} for k, s in runs
    ]
    verdict = judge(rows, compare_rewards=args.tail is None)
    print_table(rows)
    given = {
        "device": args.device,
        "gpus": args.gpus,
        "steps": args.num_rollout,
        "one_gpu": args.one_gpu,
        "tail": args.tail,
        "model": args.model.name,
    }
    print(json.dumps({**given, "runs": rows, **verdict}))
    return 0 if verdict.get("within_spread", True) else 1


def count_the_gpu_twice() -> None:
    """Start the cluster that the runs connect to; it ends with this process."""
    from slime.plugins.actors.ray_cluster import QUIET_ENVIRONMENT

    os.environ.update(QUIET_ENVIRONMENT, CUDA_VISIBLE_DEVICES="0,0")
    import ray

    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=2,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=4 * 2**30,
        log_to_driver=False,
    )
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    del os.environ["CUDA_VISIBLE_DEVICES"]


def run_folder(args: argparse.Namespace, kind: str, seed: int) -> Path:
    return Path(args.output_dir / "runs" / f"{kind}-seed{seed}")


def finish(args: argparse.Namespace, kind: str, seed: int, free: Queue[str | None]) -> str | None:
    """A run that is not there yet, on the next GPUs that are free; None, or what went wrong."""
    folder = run_folder(args, kind, seed)
    if (folder / "summary.json").is_file():
        return None
    gpus = free.get()
    try:
        problem = start(args, kind, seed, folder.name, gpus)
    finally:
        free.put(gpus)
    print(f"{folder.name}: {problem or 'done'}", flush=True)
    return problem and f"{folder.name}: {problem}"


def start(
    args: argparse.Namespace, kind: str, seed: int, name: str, gpus: str | None
) -> str | None:
    """One run, to its end; None, or what went wrong."""
    from slime.plugins.tools.commands.make_data import make_products

    rows, _ = make_products(args.output_dir / f"data-seed{seed}-{name}", seed=seed)
    script, own = KINDS[kind]
    task = (
        QUICKSTART
        if args.tail is None
        else f"{LONG_TAIL} --rollout-max-response-len {16 * args.tail}"
    )
    flags = f"""
        --hf-checkpoint {args.model} --prompt-data {rows} --apply-chat-template --rollout-shuffle {task}
        --num-rollout {args.num_rollout} --use-dynamic-batch-size --train-backend fsdp
        --seed {seed} --rollout-seed {seed} --output-dir {args.output_dir / "runs"}
        --run-name {name} {"--actor-num-gpus-per-node 1 --rollout-num-gpus 1" if args.device == "cuda" else ""}
    """
    log = args.output_dir / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(CHECKOUT / script), *shlex.split(f"{flags} {own} {args.flags}")]
    path = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})}
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=CHECKOUT, env=env, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(args.deadline)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its engines and workers in order
            process.wait(60)
            return f"not done after {args.deadline:.0f} s; see {log}"
    return None if code == 0 else f"{script} ended with status {code}; see {log}"


# --- what the runs left
# -----------------------------------------------------------------------------


def measure(folder: Path) -> dict[str, Any]:
    steps = [row for row in read_metrics(folder / "metrics.jsonl") if "rollout/step" in row]
    generating, training = intervals(folder / "traces")
    return {
        "seconds": round(training[-1][1] - generating[0][0], 1),
        "step_seconds": round(steady_step_seconds(training), 2),
        "generation_seconds": round(sum(end - start for start, end in generating), 1),
        "training_seconds": round(sum(end - start for start, end in training), 1),
        "by_version": reward_by_version(folder),
        "staleness_max": max(row["rollout/staleness/max"] for row in steps),
        "several_versions": round(
            statistics.fmean(row["rollout/several_versions_ratio"] for row in steps), 3
        ),
        "tis_clipfrac": round(
            statistics.fmean(row.get("train/tis_clipfrac", 0.0) for row in steps), 4
        ),
        "overlap": round(overlap(training, generating), 3),
    }


def steady_step_seconds(training: list[Interval]) -> float:
    """From the end of a step's training to the next one's, in the mean without the first and the
    last steps.
    """
    ends = [end for _, end in training]
    ends = ends[FIRST_STEPS - 1 : -LAST_STEPS] if len(ends) > FIRST_STEPS + LAST_STEPS else ends
    return (ends[-1] - ends[0]) / max(len(ends) - 1, 1)


def reward_by_version(run: Path) -> dict[int, tuple[float, int]]:
    """Of the answers that each version of the weights ended, by the steps that had trained it:
    their mean reward, and how many they are."""
    rewards: dict[int, list[float]] = {}
    for path in sample_files(run, "rollout").values():
        for sample in read_samples(path):
            rewards.setdefault(int(sample["weight_versions"][-1].split(".")[1]), []).append(
                float(sample["reward"])
            )
    return {
        version: (round(statistics.fmean(values), 3), len(values))
        for version, values in sorted(rewards.items())
    }


def intervals(traces: Path) -> tuple[list[Interval], list[Interval]]:
    """Seconds in which engines generated, and in which the trainer trained: joined, in order."""
    generating: set[Interval] = set()
    training: set[Interval] = set()
    for path in sorted(traces.glob("rollout_*.json.gz")):
        for event in read_trace(path):
            if event["ph"] == "X" and event["name"] in ("sglang_generate", "train"):
                span = (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
                (training if event["name"] == "train" else generating).add(span)
    return joined(generating), joined(training)


def joined(spans: Iterable[Interval]) -> list[Interval]:
    result: list[Interval] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def overlap(of: list[Interval], others: list[Interval]) -> float:
    """The share of ``of`` that ``others`` cover."""
    both = sum(max(min(b, d) - max(a, c), 0.0) for a, b in of for c, d in others)
    return both / max(sum(b - a for a, b in of), 1e-9)


def judge(rows: list[dict[str, Any]], compare_rewards: bool = True) -> dict[str, Any]:
    """Wall times, and with ``compare_rewards`` the rewards at equal samples.

    Adds ``late_reward`` to the rows: over the later half of the versions that all have. It may lie
    below the spread of the synchronous seeds by half of that: three seeds show less than the whole
    of it.
    """
    base = next(row for row in rows if row["kind"] == "sync")  # of the seed that the others have
    others = [row for row in rows if row["kind"] != "sync"]
    times = {
        f"{what}_over_sync": {row["kind"]: round(row[name] / base[name], 3) for row in others}
        for what, name in (("wall_time", "seconds"), ("steady_step", "step_seconds"))
    }
    if not compare_rewards:
        return times
    common = sorted(set.intersection(*(set(row["by_version"]) for row in rows)))
    for row in rows:  # the last version that all have may have ended few answers of a run
        late = [row["by_version"][v] for v in common[len(common) // 2 :]]
        row["late_reward"] = round(
            sum(reward * n for reward, n in late) / sum(n for _, n in late), 3
        )
    sync = [row for row in rows if row["kind"] == "sync"]
    low, high = min(row["late_reward"] for row in sync), max(row["late_reward"] for row in sync)
    margin = (high - low) / 2
    return {
        "sync_reward_spread": [low, high],
        "within_spread": all(row["late_reward"] >= low - margin for row in others),
        **times,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = [{name: value for name, value in row.items() if name != "by_version"} for row in rows]
    table = Table(*shown[0])
    for row in shown:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=160).print(table)


if __name__ == "__main__":
    sys.exit(main())
