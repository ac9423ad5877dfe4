"""Recipes with results: a real model, SmolLM2-135M-Instruct, learns arithmetic with each kind of
training that slime has.

    python benchmarks/recipes.py --model FOLDER --output DIR                     # all, one after the other
    python benchmarks/recipes.py --model FOLDER --output DIR --only grpo,lora --seeds 1,2,3
    python benchmarks/recipes.py --model FOLDER --output DIR --gpus 0,1 --at-once 3
    python benchmarks/recipes.py --page benchmarks/results/h200_recipes.jsonl    # docs/en/recipes.md

The task is a mixture of sums of two-digit numbers, of three digits, products, word problems and the
largest of four numbers, 48 tokens at most; 128 questions that no run trains on are answered before
and after, four times each at temperature 1. Each run is ``python train.py`` with a deadline and a
folder of its own; one that fails costs its own row only. With ``--at-once``, runs share a GPU, so
their seconds are those of a busy machine. ``recipes.jsonl`` in DIR has a line for each run and
``recipes.png`` the curves; the last line is JSON. ``--page`` writes the table of such a file into the page.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
PAGE = CHECKOUT / "docs" / "en" / "recipes.md"
BEGIN, END = "<!-- table: python benchmarks/recipes.py --page FILE -->", "<!-- end of the table -->"
SYSTEM = "Answer with a number."
HELD_OUT = 128
GRACE_SECONDS = 40.0


@dataclass(frozen=True)
class Recipe:
    """One kind of training: what it needs beside the flags of all."""

    what: str
    flags: str = ""
    script: str = "train.py"
    gpus: int = 1
    engine: str = "sglang"
    batch: dict[str, int] = field(default_factory=dict)


COLOCATED = "--colocate --no-offload-train --no-offload-rollout"
FULLY_ASYNC = (
    "--rollout-num-gpus 1 --async-buffer-size 2 --max-weight-staleness 2 --rollout-function-path "
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
)
RECIPES = {
    "grpo": Recipe("GRPO", COLOCATED),
    "grpo_embedded": Recipe("GRPO in one process", f"--inline {COLOCATED}", engine="embedded"),
    "dapo": Recipe(
        "DAPO, groups without a signal are replaced",
        f"{COLOCATED} --recipe dapo --over-sampling-batch-size 24",
    ),
    "ppo": Recipe(
        "PPO with a critic",
        f"{COLOCATED} --advantage-estimator ppo --normalize-advantages --critic-lr 5e-5",
    ),
    "lora": Recipe("GRPO, LoRA of rank 16", f"{COLOCATED} --lora-rank 16 --lr 2e-4"),
    "lora_adapter": Recipe(
        "the same, only the adapter is sent",
        f"{COLOCATED} --lora-rank 16 --lr 2e-4 --lora-sync adapter",
    ),
    "async": Recipe("GRPO, fully asynchronous", FULLY_ASYNC, "train_async.py", gpus=2),
    "megatron": Recipe("GRPO with Megatron", f"{COLOCATED} --train-backend megatron"),
}


def sums(rng: random.Random) -> tuple[str, int]:
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    return f"What is {a} + {b}?", a + b


def sums_of_three(rng: random.Random) -> tuple[str, int]:
    terms = [rng.randint(1, 9) for _ in range(3)]
    return f"What is {' + '.join(map(str, terms))}?", sum(terms)


def products(rng: random.Random) -> tuple[str, int]:
    a, b = rng.randint(2, 9), rng.randint(2, 19)
    return f"What is {a} times {b}?", a * b


def word_problems(rng: random.Random) -> tuple[str, int]:
    name, thing = rng.choice(("Tom", "Ann", "Sara")), rng.choice(("apples", "books", "coins"))
    kept, moved = rng.randint(5, 20), rng.randint(2, 15)
    if rng.random() < 0.5:
        text = f"{name} has {kept} {thing} and buys {moved} more. How many {thing} does {name} have now?"
        return text, kept + moved
    text = f"{name} has {kept + moved} {thing} and gives away {moved}. How many {thing} are left?"
    return text, kept


def largest(rng: random.Random) -> tuple[str, int]:
    numbers = rng.sample(range(1, 1000), 4)
    return f"Which is the largest of {', '.join(map(str, numbers))}?", max(numbers)


KINDS = (sums, sums_of_three, products, word_problems, largest)


def write_data(folder: Path, rows: int = 6000, seed: int = 1) -> tuple[Path, Path]:
    """Rows to train on, and 128 held-out questions, none of which is among them."""
    rng = random.Random(seed)
    questions: dict[str, int] = {}
    while len(questions) < HELD_OUT + rows // 3:
        text, answer = rng.choice(KINDS)(rng)
        questions.setdefault(text, answer)
    made = [
        {
            "prompt": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": text},
            ],
            "label": str(answer),
        }
        for text, answer in questions.items()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "held_out.jsonl"
    for path, part in zip(paths, (made[HELD_OUT:], made[:HELD_OUT]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return paths


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", type=Path, help="write this file's table into the page, no run")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=Path, help="folder for runs and results")
    parser.add_argument("--only", default=",".join(RECIPES), help="comma-separated; default: all")
    parser.add_argument("--seeds", default="1", help="comma-separated")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument(
        "--gpus",
        default=os.environ.get("CUDA_VISIBLE_DEVICES") or "0",
        help="comma-separated numbers of the GPUs to use; default: those of CUDA_VISIBLE_DEVICES, or 0",
    )
    parser.add_argument("--at-once", type=int, default=1, help="runs on a GPU at a time")
    parser.add_argument("--seconds", type=float, default=500.0, help="deadline of each run")
    parser.add_argument("--flags", default="", help="more flags for each run")
    parser.add_argument("--device", default="cuda", help="cpu for a trial with the embedded engine")
    options = parser.parse_args()
    if options.page is None and (options.model is None or options.output is None):
        parser.error("--model and --output are needed, or --page")
    if unknown := set(options.only.split(",")) - set(RECIPES):
        parser.error(f"--only {', '.join(sorted(unknown))}: known are {', '.join(RECIPES)}")
    return options


def command(
    options: argparse.Namespace, name: str, seed: int, data: tuple[Path, Path]
) -> list[str]:
    """The whole command of one run."""
    recipe = RECIPES[name]
    on_cuda = options.device == "cuda"
    prompts, samples, tokens = (16, 16, 16384) if on_cuda else (4, 4, 2048)
    flags: dict[str, Any] = {
        "hf-checkpoint": options.model.resolve(),
        "prompt-data": data[0],
        "rm-type": "last_number",
        "rollout-batch-size": prompts,
        "n-samples-per-prompt": samples,
        "rollout-max-response-len": 48,
        "num-rollout": options.steps,
        "eval-interval": options.steps,
        "n-samples-per-eval-prompt": 4 if on_cuda else 1,
        "eval-temperature": 1,
        "advantage-estimator": "grpo",
        "lr": 2e-5,
        "max-tokens-per-gpu": tokens,
        "train-dtype": "bfloat16" if on_cuda else "float32",
        "rollout-dtype": "bfloat16" if on_cuda else "float32",
        "train-backend": "fsdp",
        "rollout-backend": recipe.engine if on_cuda else "embedded",
        "seed": seed,
        "rollout-seed": seed,
        "output-dir": options.output.resolve(),
        "run-name": f"{name}-seed{seed}",
        "phase-timeout": options.seconds,
    }
    own = shlex.split(recipe.flags) + shlex.split(options.flags)
    set_here = {word.removeprefix("--") for word in own}
    words = [
        word
        for flag, value in flags.items()
        if flag not in set_here
        for word in (f"--{flag}", str(value))
    ]
    words += ["--eval-prompt-data", "arithmetic", str(data[1]), "--apply-chat-template"]
    words += ["--rollout-shuffle", "--use-dynamic-batch-size", "--actor-num-gpus-per-node", "1"]
    if on_cuda and recipe.engine == "sglang":
        words += ["--sglang-attention-backend", "triton", "--sglang-mem-fraction-static", "0.2"]
        words += ["--sglang-cuda-graph-max-bs-decode", str(2 * prompts * samples)]
        words += ["--sglang-disable-prefill-cuda-graph"]
    return [sys.executable, str(CHECKOUT / recipe.script), *words, *own]


def run(
    options: argparse.Namespace, name: str, seed: int, data: tuple[Path, Path], gpus: list[str]
) -> dict[str, Any]:
    """One run to its end or its deadline, and its row of the table."""
    words = command(options, name, seed, data)
    folder = options.output / f"{name}-seed{seed}"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    environment["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    log = options.output / f"{name}-seed{seed}.log"
    started = time.monotonic()
    with open(log, "w", encoding="utf-8") as file:
        child = subprocess.Popen(
            words,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=options.output,
        )
        try:
            code = child.wait(options.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGTERM)
            try:
                code = child.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                code = child.wait()
    row = {"recipe": name, "seed": seed, "exit_code": code, "flags": RECIPES[name].flags}
    row |= {"steps": options.steps, "seconds": round(time.monotonic() - started, 1)}
    row |= figures(folder)
    print(json.dumps({key: value for key, value in row.items() if key != "rewards"}), flush=True)
    if code != 0:
        print(log.read_text(encoding="utf-8", errors="replace")[-1500:], flush=True)
    return row


def figures(folder: Path) -> dict[str, Any]:
    """What the files of a run say: held-out accuracy, curve, seconds of a step, memory."""
    found: dict[str, Any] = {}
    summary = folder / "summary.json"
    if summary.is_file():
        said = json.loads(summary.read_text(encoding="utf-8"))
        found = {name: said.get(name) for name in ("accuracy_before", "accuracy_after")}
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        return found
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "rollout/raw_reward" in row]

    def median(key: str) -> float | None:
        values = [row[key] for row in steps[1:] if row.get(key) is not None]
        return round(statistics.median(values), 3) if values else None

    used = [
        value
        for row in rows
        for key, value in row.items()
        if key.startswith("memory/") and key.endswith("/process") and value is not None
    ]
    return found | {
        "rewards": [round(row["rollout/raw_reward"], 4) for row in steps],
        "step_seconds": median("perf/step_time"),
        "train_seconds": median("perf/train_time"),
        "rollout_seconds": median("perf/rollout_time"),
        "tokens_per_gpu_per_second": median("perf/tokens_per_gpu_per_sec"),
        "logprob_gap": median("train/train_rollout_logprob_abs_diff"),
        "trainer_gib": round(max(used), 1) if used else None,
    }


class Slots:
    """Which GPUs are free; a GPU has ``at_once`` places."""

    def __init__(self, gpus: list[str], at_once: int) -> None:
        self.free = dict.fromkeys(gpus, at_once)
        self.changed = threading.Condition()

    @contextmanager
    def take(self, count: int) -> Iterator[list[str]]:
        """Wait for a place on ``count`` GPUs, those with the most free places first."""
        with self.changed:
            while len(chosen := [gpu for gpu, free in self.free.items() if free]) < count:
                self.changed.wait()
            chosen = sorted(chosen, key=lambda gpu: -self.free[gpu])[:count]
            for gpu in chosen:
                self.free[gpu] -= 1
        try:
            yield chosen
        finally:
            with self.changed:
                for gpu in chosen:
                    self.free[gpu] += 1
                self.changed.notify_all()


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Mean reward of each rollout, one line a run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    colors = {name: f"C{index}" for index, name in enumerate(RECIPES)}
    named: set[str] = set()
    for row in rows:
        rewards = row.get("rewards") or []
        window = 5
        smooth = [
            statistics.fmean(rewards[max(0, at + 1 - window) : at + 1])
            for at in range(len(rewards))
        ]
        name = row["recipe"]
        label = None if name in named else RECIPES[name].what
        named.add(name)
        axes.plot(smooth, color=colors[name], label=label, linewidth=1.2)
    axes.set_xlabel("rollout")
    axes.set_ylabel("mean reward (mean of five rollouts)")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows of the page, one for each recipe; several seeds are separated by commas."""
    lines = [
        "| recipe | GPUs | flags | held out, before → after | curve | seconds of a step | of the run |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, recipe in RECIPES.items():
        own = [row for row in rows if row["recipe"] == name and row["exit_code"] == 0]
        if not own:
            continue
        accuracy = ", ".join(
            f"{row['accuracy_before']:.2f} → {row['accuracy_after']:.2f}" for row in own
        )
        steps = statistics.median(row["step_seconds"] for row in own)
        seconds = ", ".join(f"{row['seconds']:.0f}" for row in own)
        start = "" if recipe.script == "train.py" else f"`{recipe.script}` "
        lines.append(
            f"| {recipe.what} | {recipe.gpus} | {start}`{recipe.flags}` | {accuracy} | "
            f"{curve(own[0]['rewards'])} | {steps:.2f} | {seconds} |"
        )
    return "\n".join(lines)


def curve(rewards: list[float]) -> str:
    """The mean reward of five rollouts at the start, at each quarter of the run, and at its end."""
    last = len(rewards) - 5
    at = [last * quarter // 4 for quarter in range(5)]
    return " → ".join(f"{statistics.fmean(rewards[first : first + 5]):.2f}" for first in at)


def write_page(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END, 1)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}", encoding="utf-8")


def main() -> None:
    options = parse_options()
    if options.page is not None:
        write_page(options.page)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    data = write_data(options.output / "data")
    jobs = [
        (name, int(seed)) for seed in options.seeds.split(",") for name in options.only.split(",")
    ]
    slots = Slots(options.gpus.split(","), options.at_once)

    def one(job: tuple[str, int]) -> dict[str, Any]:
        with slots.take(RECIPES[job[0]].gpus) as gpus:
            row = run(options, *job, data, gpus)
        with open(options.output / "recipes.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return row

    with ThreadPoolExecutor(len(jobs)) as pool:
        rows = list(pool.map(one, jobs))
    draw(rows, options.output / "recipes.png")
    print(table(rows), flush=True)
    short = [{k: v for k, v in row.items() if k != "rewards"} for row in rows]
    print(json.dumps({"benchmark": "recipes", "recipes": short}), flush=True)
    raise SystemExit(max(abs(row["exit_code"]) for row in rows) and 1)


if __name__ == "__main__":
    main()
