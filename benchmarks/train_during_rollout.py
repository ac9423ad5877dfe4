"""Seconds of a step whose answers have a long tail, with and without ``--train-during-rollout``.

    python benchmarks/train_during_rollout.py                                # one GPU, two apart: four runs
    python benchmarks/train_during_rollout.py --gpus 0 1 2,3 --cells colocated:1 colocated:8 apart:8
    python benchmarks/train_during_rollout.py --device cpu --tiny            # a trial of the script

The work is that of ``verl_step.py --lengths log-normal:512:4096``: 32 x 8 answers with random
rewards. A cell is a placement and a number of parts (1: without the flag). ``apart``: engine and
trainer have a GPU each; ``colocated``: they share one, and nothing is offloaded. With several sets
of GPUs, as many runs go on at once, in the order of ``--cells``. The first step compiles and is not
counted. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import verl_step
from random_model import SHAPES, write_model

HERE = Path(__file__).resolve().parent
PHASES = {
    "step": "perf/step_time", "rollout": "perf/rollout_time", "train": "perf/train_time",
    "trainer_busy": "perf/actor_train_time", "update_weights": "perf/update_weights_time",
    "early": "perf/trained_during_rollout_ratio", "response_tokens": "rollout/response_len/mean",
    "grad_norm": "train/grad_norm", "tok_per_s": "perf/actor_train_tok_per_s",
}  # fmt: skip
CELLS = ("colocated:1", "colocated:8", "apart:1", "apart:8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", choices=[*SHAPES], default="qwen3-0.6b", help="of random_model.py"
    )
    parser.add_argument("--cells", nargs="+", default=CELLS, metavar="PLACEMENT:PARTS")
    parser.add_argument(
        "--gpus", nargs="+", default=["0,1"], metavar="A,B", help="of a run; several run at once"
    )
    parser.add_argument("--steps", type=int, default=3, help="counted steps (default: 3)")
    parser.add_argument(
        "--engine-memory", type=float, default=0.45, help="share of a GPU for SGLang"
    )
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=540.0, help="that each run may take")
    parser.add_argument("--flags", default="", help='more flags: --flags="--no-compile-layers"')
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape and batch, for a trial")
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=HERE.parent / "outputs" / "benchmarks" / "train_during_rollout",
    )
    options = parser.parse_args()
    options.output_dir = options.output_dir.expanduser().resolve()
    if options.tiny:
        options.shape = "tiny"
        options.steps = 1
    return options


def work(options: argparse.Namespace, cell: str, gpus: str) -> argparse.Namespace:
    """The options of ``verl_step.py`` for one run."""
    placement, _, parts = cell.partition(":")
    flags = "--train-during-rollout " + parts
    if placement == "apart":
        flags += " --rollout-num-gpus 1"
    else:
        flags += " --no-offload-rollout"
        gpus = gpus.partition(",")[0]
    words: list[Any] = ["--shape", options.shape, "--only", "ours", "--steps", options.steps]
    words += ["--lengths", "log-normal:8:64" if options.tiny else "log-normal:512:4096"]
    words += ["--prompts", 8, "--group-size", 2] if options.tiny else []
    words += ["--micro-batch-tokens", options.micro_batch_tokens, "--seconds", options.seconds]
    words += ["--engine-memory", options.engine_memory, "--device", options.device, "--gpu", gpus]
    words += ["--output-dir", options.output_dir / cell.replace(":", "-")]
    words += [f"--our-flags={flags} {options.flags}"]
    args = verl_step.parse_args(list(map(str, words)))
    args.model = options.output_dir / f"model-{options.shape}"
    return args


def measure(options: argparse.Namespace, cell: str, free: Queue[str]) -> dict[str, Any]:
    """One run to its end on the next GPUs that are free; the medians of its counted steps."""
    gpus = free.get()
    try:
        args = work(options, cell, gpus)
        args.output_dir.mkdir(parents=True, exist_ok=True)
        verl_step.write_questions(args)
        failure = verl_step.run_side(args, "ours")
    finally:
        free.put(gpus)
    rows = verl_step.read_rows(args, "ours")[args.warmup :]
    steps = {name: [row[key] for row in rows if key in row] for name, key in PHASES.items()}
    steps = {name: values for name, values in steps.items() if values}
    medians = {name: round(statistics.median(values), 3) for name, values in steps.items()}
    print(f"{cell:14s} {medians} {failure[-1500:]}", flush=True)
    return {"steps": steps, "medians": medians, **({"failed": failure} if failure else {})}


def main() -> int:
    options = parse_args()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    write_model(options.shape, options.output_dir / f"model-{options.shape}")
    free: Queue[str] = Queue()  # the sets of GPUs that no run has
    for gpus in options.gpus:
        free.put(gpus)
    with ThreadPoolExecutor(len(options.gpus)) as pool:
        found = dict(
            zip(
                options.cells,
                pool.map(lambda cell: measure(options, cell, free), options.cells),
                strict=True,
            )
        )
    given = {
        name: getattr(options, name)
        for name in ("shape", "device", "engine_memory", "micro_batch_tokens", "flags")
    }
    print(json.dumps({"benchmark": "train_during_rollout", **given, "cells": found}))
    return int(any("failed" in cell for cell in found.values()))


if __name__ == "__main__":
    sys.exit(main())
