"""Recipes with results: real models, SmolLM2-135M-Instruct and Gemma-3-270M, learn with each kind of
training that slime has.

    python benchmarks/recipes.py --model FOLDER --output DIR                     # all, one after the other
    python benchmarks/recipes.py --model FOLDER --output DIR --only grpo,lora --seeds 1,2,3
    python benchmarks/recipes.py --model FOLDER --output DIR --gpus 0,1 --at-once 3
    python benchmarks/recipes.py --model FOLDER --gemma FOLDER --gsm8k FOLDER --output DIR --only gemma,gsm8k
    python benchmarks/recipes.py --page benchmarks/results/h200_recipes.jsonl    # docs/en/recipes.md

The task of most is a mixture of sums of two-digit numbers, of three digits, products, word problems
and the largest of four numbers, 48 tokens at most; others have tasks of their own (``recipe_data.py``,
``recipe_tasks.py``). 128 questions that no run trains on are answered before and after, four times
each at temperature 1. Each run is ``python train.py`` with a deadline and a folder of its own, some
after a short supervised fine-tuning; one that fails costs its own row only. With ``--at-once``, runs
share a GPU, so their seconds are those of a busy machine. ``recipes.jsonl`` in DIR has a line for
each run and ``recipes.png`` the curves; the last line is JSON. ``--page`` writes the table of such a
file into the page, and its curves beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipe_data import (
    GUESSES,
    GYM_SEEDS,
    drop_layers,
    gym_environment,
    write_answers,
    write_calculations,
    write_calls,
    write_data,
    write_few_shot,
    write_games,
    write_gsm8k,
    write_gym,
    write_gym_answers,
    write_questions,
    write_solutions,
)
from recipe_kinds import COLOCATED, RECIPES
from recipe_page import draw, table, write_page

CHECKOUT = Path(__file__).resolve().parents[1]
HOOKS = CHECKOUT / "benchmarks" / "recipe_tasks.py"
GRACE_SECONDS = 40.0
WARM_UP = {
    "arithmetic": write_answers,
    "calculator": write_calls,
    "reasoning_gym": write_gym_answers,
}
"""What writes the conversations for the supervised fine-tuning before a task."""


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", type=Path, help="write this file's table into the page, no run")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--gemma", type=Path, help="folder of Gemma-3-270M, for gemma and gsm8k")
    parser.add_argument("--gsm8k", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--output", type=Path, help="folder for runs and results")
    parser.add_argument(
        "--only", help="comma-separated; default: all whose models and data are given"
    )
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
    missing = {
        name: needs
        for name, recipe in RECIPES.items()
        if (needs := [f"--{each}" for each in recipe.needs if getattr(options, each) is None])
    }
    if options.only is None:
        options.only = ",".join(name for name in RECIPES if name not in missing)
    for name in options.only.split(","):
        if name not in RECIPES:
            parser.error(f"--only {name}: known are {', '.join(RECIPES)}")
        if name in missing:
            parser.error(f"--only {name} needs {' and '.join(missing[name])}")
    return options


def task_flags(options: argparse.Namespace, task: str) -> tuple[dict[str, Any], list[str]]:
    """The flags of a task, and its evaluation; writes its rows."""
    folder = options.output.resolve() / "data" / task
    flags: dict[str, Any] = {}
    if task == "guess":
        flags["environment"] = f"{HOOKS}:Guess"
        held_out = write_games(folder, flags["environment"])
        flags |= {"max-turns": GUESSES, "rollout-max-response-len": 128}
    elif task == "calculator":
        train, held_out = write_calculations(folder)
        flags |= {"prompt-data": train, "custom-rm-path": f"{HOOKS}:last_turn"}
        flags |= {"custom-generate-function-path": f"{HOOKS}:calculate", "max-turns": 3}
        flags |= {"rollout-max-response-len": 128}
    elif task == "reasoning_gym":
        flags["environment"] = gym_environment(GYM_SEEDS[0])
        held_out = write_gym(folder)
        flags["rollout-max-response-len"] = 48
    elif task == "gsm8k":
        train, held_out = write_gsm8k(folder, options.gsm8k)
        flags |= {"prompt-data": train, "rm-type": "last_number", "rollout-max-response-len": 192}
        flags["rollout-stop"] = "\n\n"
    elif task == "solutions":
        train, held_out = write_questions(folder, options.gsm8k)
        flags |= {"prompt-data": train, "rm-type": "last_number", "rollout-max-response-len": 192}
    elif task == "few_shot":
        train, held_out = write_few_shot(folder)
        flags |= {"prompt-data": train, "rm-type": "last_number", "rollout-max-response-len": 12}
        flags["rollout-stop"] = "\n"
    else:
        train, held_out = write_data(folder)
        flags |= {"prompt-data": train, "rm-type": "last_number", "rollout-max-response-len": 48}
    part = "" if options.device == "cuda" else "@[:8]"
    return flags, ["--eval-prompt-data", task, f"{held_out}{part}"]


def command(options: argparse.Namespace, name: str, seed: int) -> list[str]:
    """The whole command of one run, without its warm-up."""
    recipe = RECIPES[name]
    on_cuda = options.device == "cuda"
    prompts, samples = (16, 16) if on_cuda else (4, 4)
    own_flags, evaluation = task_flags(options, recipe.task)
    flags: dict[str, Any] = {
        **of_all(options),
        **({"hf-checkpoint": options.gemma.resolve()} if "gemma" in recipe.needs else {}),
        **own_flags,
        "rollout-batch-size": prompts,
        "n-samples-per-prompt": samples,
        "num-rollout": options.steps,
        "eval-interval": options.steps,
        "advantage-estimator": "grpo",
        "lr": 2e-5,
        "rollout-backend": recipe.engine if on_cuda else "embedded",
        "seed": seed,
        "rollout-seed": seed,
        "run-name": f"{name}-seed{seed}",
    }
    before = options.output.resolve() / f"{name}-seed{seed}-before"
    if recipe.teacher:
        flags |= {"distill-teacher": before / "model", "hf-checkpoint": before / "student"}
    elif recipe.warm_up:
        flags["load"] = before / "checkpoints"
    own = shlex.split(recipe.flags) + shlex.split(options.flags)
    words = [*listed(flags, own), *evaluation, "--rollout-shuffle", "--use-dynamic-batch-size"]
    words += ["--finetune"] if recipe.warm_up and not recipe.teacher else []
    if on_cuda and recipe.engine == "sglang":
        words += ["--sglang-attention-backend", "triton", "--sglang-mem-fraction-static", "0.2"]
        # Little, so that several runs may start on a GPU at once.
        words += ["--sglang-max-total-tokens", "131072"]
        words += ["--sglang-cuda-graph-max-bs-decode", str(2 * prompts * samples)]
        words += ["--sglang-disable-prefill-cuda-graph"]
    return [sys.executable, str(CHECKOUT / recipe.script), *words, *own]


def of_all(options: argparse.Namespace) -> dict[str, Any]:
    """The flags of every run and of every warm-up."""
    on_cuda = options.device == "cuda"
    return {
        "hf-checkpoint": options.model.resolve(),
        "n-samples-per-eval-prompt": 4 if on_cuda else 1,
        "eval-temperature": 1,
        "max-tokens-per-gpu": 16384 if on_cuda else 2048,
        "train-dtype": "bfloat16" if on_cuda else "float32",
        "rollout-dtype": "bfloat16" if on_cuda else "float32",
        "train-backend": "fsdp",
        "actor-num-gpus-per-node": 1,
        "output-dir": options.output.resolve(),
        "phase-timeout": options.seconds,
    }


def listed(flags: dict[str, Any], own: list[str]) -> list[str]:
    """The words of ``flags``, without those that a recipe sets itself."""
    words: list[str] = []
    for flag, value in flags.items():
        if f"--{flag}" not in own:
            words += [f"--{flag}", str(value)]
    return words


def warm_up_command(options: argparse.Namespace, name: str, seed: int) -> list[str]:
    """Supervised fine-tuning in one process, with an evaluation before and after."""
    recipe = RECIPES[name]
    run_name = f"{name}-seed{seed}-before"
    folder = options.output.resolve() / run_name
    own_flags, evaluation = task_flags(options, recipe.task)
    if own_flags.pop("environment", None):  # it brings prompts of its own, and evaluates no others
        evaluation = []
    data = options.output.resolve() / "data" / recipe.task
    rows = (
        write_solutions(data, options.gsm8k)
        if recipe.task == "solutions"
        else WARM_UP[recipe.task](data)
    )
    steps = recipe.warm_up if options.device == "cuda" else 2
    flags: dict[str, Any] = {
        **of_all(options),
        **own_flags,
        "prompt-data": rows,
        "input-key": "messages",
        "loss-type": "sft_loss",
        "rollout-function-path": "slime.rollout.sft_rollout.generate_rollout",
        "eval-function-path": "slime.rollout.sglang_rollout.generate_rollout",
        "eval-input-key": "prompt",
        "rollout-batch-size": 64 if options.device == "cuda" else 8,
        "num-rollout": steps,
        **({"eval-interval": steps} if evaluation else {}),
        "save-interval": steps,
        "save": folder / "checkpoints",
        "save-hf": folder / "model",
        "lr": recipe.warm_up_lr,
        "rollout-backend": "embedded",
        "seed": seed,
        "run-name": run_name,
    }
    words = [*listed(flags, []), *evaluation, "--rollout-shuffle", "--use-dynamic-batch-size"]
    words += ["--inline", "--no-compile-layers", "--no-save-optim", *shlex.split(COLOCATED)]
    words += ["--disable-compute-advantages-and-returns"]
    return [sys.executable, str(CHECKOUT / "train.py"), *words]


def run(options: argparse.Namespace, name: str, seed: int, gpus: list[str]) -> dict[str, Any]:
    """One run to its end or its deadline, and its row of the table."""
    recipe, run_name = RECIPES[name], f"{name}-seed{seed}"
    started = time.monotonic()
    row: dict[str, Any] = {"recipe": name, "seed": seed, "exit_code": 0, "flags": recipe.flags}
    row |= {"steps": options.steps}
    commands = {run_name: command(options, name, seed)}
    if recipe.warm_up:
        commands = {f"{run_name}-before": warm_up_command(options, name, seed), **commands}
    if recipe.teacher:
        student = options.output / f"{run_name}-before" / "student"
        drop_layers(options.model, student)
    with peak_gib(gpus) as peak:
        for part, words in commands.items():
            left = options.seconds - (time.monotonic() - started)
            row["exit_code"] = start(options, words, options.output / f"{part}.log", gpus, left)
            found = figures(options.output / part)
            if part != run_name:
                row["warm_up"] = [found.get("accuracy_before"), found.get("accuracy_after")]
            else:
                row |= found
            if row["exit_code"] != 0:
                break
    row |= {"seconds": round(time.monotonic() - started, 1), "gpu_gib": max(peak, default=None)}
    print(json.dumps({key: value for key, value in row.items() if key != "rewards"}), flush=True)
    return row


def start(
    options: argparse.Namespace, words: list[str], log: Path, gpus: list[str], seconds: float
) -> int:
    """One process to its end or its deadline; its exit code."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    folders = [str(CHECKOUT), str(HOOKS.parent), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    with open(log, "w", encoding="utf-8") as file:
        file.write(shlex.join(words) + "\n")
        file.flush()
        child = subprocess.Popen(
            words,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=options.output,
        )
        code = None
        for wait, number in ((seconds, signal.SIGTERM), (GRACE_SECONDS, signal.SIGKILL)):
            try:
                code = child.wait(max(wait, 1.0))
                break
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, number)
        code = child.wait() if code is None else code
    if code != 0:
        print(log.read_text(encoding="utf-8", errors="replace")[-1500:], flush=True)
    return code


@contextlib.contextmanager
def peak_gib(gpus: list[str]) -> Iterator[list[float]]:
    """Meanwhile, each two seconds, the memory in use on the fullest of these GPUs, with all that
    runs there."""
    seen: list[float] = []
    ended = threading.Event()
    query = ["nvidia-smi", "-i", ",".join(gpus)]
    query += ["--query-gpu=memory.used", "--format=csv,noheader,nounits"]

    def watch() -> None:
        while not ended.wait(2.0):
            said = subprocess.run(query, capture_output=True, text=True).stdout.split()
            seen.extend(round(int(word) / 1024, 1) for word in said if word.isdigit())

    thread = threading.Thread(target=watch, daemon=True)
    if shutil.which("nvidia-smi") is not None:
        thread.start()
    try:
        yield seen
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()


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
    steps = [row for row in rows if "rollout/step" in row]

    def median(key: str) -> float | None:
        values = [row[key] for row in steps[1:] if row.get(key) is not None]
        return round(statistics.median(values), 3) if values else None

    return found | {
        "rewards": [
            round(x, 4) for row in steps if (x := row.get("rollout/raw_reward")) is not None
        ],
        "step_seconds": median("perf/step_time"),
        "train_seconds": median("perf/train_time"),
        "rollout_seconds": median("perf/rollout_time"),
        "tokens_per_gpu_per_second": median("perf/tokens_per_gpu_per_sec"),
        "logprob_gap": median("train/train_rollout_logprob_abs_diff"),
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


def main() -> None:
    options = parse_options()
    if options.page is not None:
        write_page(options.page)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    jobs = [
        (name, int(seed)) for seed in options.seeds.split(",") for name in options.only.split(",")
    ]
    slots = Slots(options.gpus.split(","), options.at_once)

    def one(job: tuple[str, int]) -> dict[str, Any]:
        with slots.take(RECIPES[job[0]].gpus) as gpus:
            row = run(options, *job, gpus)
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
