"""Seconds per GRPO step: slime against TRL on this machine, in one run.

Both train the same model on the same rows, in the same dtype, with the same group size, response
length, learning rate and number of threads, without a reference model. A step is generation,
reward, forward, backward and optimizer; ours includes bringing the weights to the engine. They run
in turns
(TRL, ours, TRL, ours, ...), never at once. The first steps of each turn are warm-up and not
counted.

TRL lives in an environment of its own, since its requirements are not ours. Make it once with

    python3.11 -m venv ~/.cache/slime/venv-trl
    ~/.cache/slime/venv-trl/bin/pip install torch==2.13.0    # first, or pip fetches CUDA's
    ~/.cache/slime/venv-trl/bin/pip install "trl==1.16.*"

or let ``--make-trl-venv`` do it. The last line of the output is JSON with all figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
VENV = Path("~/.cache/slime/venv-trl").expanduser()
TORCH, TRL = "torch==2.13.0", "trl==1.16.*"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="Hugging Face folder; default: models/SmolLM2-135M-Instruct"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and compute"
    )
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step (default: 8)")
    parser.add_argument("--group-size", type=int, default=8, help="samples per prompt (default: 8)")
    parser.add_argument("--new-tokens", type=int, default=20, help="longest response (default: 20)")
    parser.add_argument("--steps", type=int, default=4, help="counted steps per turn (default: 4)")
    parser.add_argument(
        "--warmup", type=int, default=1, help="steps at the start of a turn that do not count"
    )
    parser.add_argument(
        "--turns", type=int, default=1, help="how often each of the two runs (default: 1)"
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="OpenMP threads of TRL's process (default: 2)"
    )
    parser.add_argument(
        "--trl-micro-batch", type=int, default=16, help="samples per forward of TRL (default: 16)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("trl", "ours"), help="measure one of the two")
    parser.add_argument(
        "--trl-venv", type=Path, default=VENV, help=f"environment with TRL (default: {VENV})"
    )
    parser.add_argument(
        "--make-trl-venv", action="store_true", help="make that environment if it is not there"
    )
    parser.add_argument(
        "--our-flags", default="", help='more flags for train.py: --our-flags="--use-router ..."'
    )
    parser.add_argument(
        "--output-dir", type=Path, default=CHECKOUT / "outputs" / "benchmarks" / "trl_step"
    )
    parser.add_argument(
        "--timeout", type=float, default=1800, help="seconds that one turn may take (default: 1800)"
    )
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)  # given to the worker
    # runs inside TRL's environment
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.model = (
        (args.model or CHECKOUT / "models" / "SmolLM2-135M-Instruct").expanduser().resolve()
    )
    if not (args.model / "config.json").is_file():
        parser.error(
            f"no model in {args.model}: run `slime fetch-model smollm2-135m-instruct`, or give "
            "--model FOLDER"
        )
    if args.prompts * args.group_size % args.trl_micro_batch:
        parser.error(
            f"{args.prompts} x {args.group_size} samples do not divide into --trl-micro-batch "
            f"{args.trl_micro_batch}"
        )
    return args


def main() -> int:
    args = parse_args()
    if args.worker:
        print(json.dumps(trl_turn(args)))
        return 0
    from slime.plugins.tools.commands.make_data import make_products

    args.output_dir = args.output_dir.expanduser().resolve()
    args.data, _ = make_products(args.output_dir / "data", seed=args.seed)
    python = None if args.only == "ours" else trl_python(args)
    turns: dict[str, list[dict[str, Any]]] = {"trl": [], "ours": []}
    for turn in range(args.turns):
        if python is not None:
            turns["trl"].append(run_trl(args, python))
        if args.only != "trl":
            turns["ours"].append(run_ours(args, turn))
    report(args, turns)
    return 0


# --- TRL ---------------------------------------------------------------------------------------


def trl_python(args: argparse.Namespace) -> Path:
    """The interpreter of TRL's environment; makes the environment if asked to."""
    python = args.trl_venv.expanduser() / "bin" / "python"
    if not python.is_file() and args.make_trl_venv:
        print(f"making {args.trl_venv} (several hundred MB)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(args.trl_venv.expanduser())], check=True)
        # torch first, so that TRL brings no other build of it
        for packages in ([TORCH], [TORCH, TRL]):
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
    if not python.is_file():
        raise SystemExit(
            f"no TRL environment in {args.trl_venv}: add --make-trl-venv, or see --help"
        )
    return python


def run_trl(args: argparse.Namespace, python: Path) -> dict[str, Any]:
    """One turn of TRL in a process of its own; its figures are the last line that it prints."""
    words = [str(python), str(Path(__file__).resolve()), "--worker"]
    for name in (
        "model",
        "dtype",
        "prompts",
        "group_size",
        "new_tokens",
        "steps",
        "warmup",
        "threads",
        "trl_micro_batch",
    ):
        words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    words += [
        "--seed",
        str(args.seed),
        "--data",
        str(args.data),
        "--output-dir",
        str(args.output_dir),
    ]
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    threads = {"OMP_NUM_THREADS": str(args.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    print("TRL:", shlex.join(words), flush=True)
    done = subprocess.run(
        words,
        env=os.environ | quiet | threads,
        stdout=subprocess.PIPE,
        text=True,
        timeout=args.timeout,
    )
    if done.returncode != 0:
        raise SystemExit(
            f"TRL's process ended with status {done.returncode}:\n{done.stdout[-4000:]}"
        )
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"TRL: {figures['seconds']}", flush=True)
    return figures


def last_number_reward(completions: list[Any], label: list[str], **_: Any) -> list[float]:
    """1 where the last number of the answer is the label: what ``--rm-type last_number`` gives."""
    import re

    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    numbers = [re.findall(r"-?\d+", text.replace(",", "")) for text in texts]
    return [float(bool(n) and int(n[-1]) == int(x)) for n, x in zip(numbers, label, strict=True)]


def trl_turn(args: argparse.Namespace) -> dict[str, Any]:
    """Runs inside TRL's environment: train and time each step.

    TRL's own defaults stay but for what makes the work equal to ours, and for gradient
    checkpointing, which is off: nothing here is short of memory, and recomputing would cost TRL a
    quarter of its speed.
    """
    import datasets
    import torch
    import transformers
    import trl

    torch.set_num_threads(args.threads)
    rows = [json.loads(line) for line in args.data.read_text().splitlines()]
    data = datasets.Dataset.from_list(
        [{"prompt": row["prompt"], "label": str(row["label"])} for row in rows]
    )
    batch = args.prompts * args.group_size
    config = trl.GRPOConfig(
        output_dir=str(args.output_dir / "trl"),
        max_steps=args.warmup + args.steps,
        per_device_train_batch_size=args.trl_micro_batch,
        gradient_accumulation_steps=batch // args.trl_micro_batch,
        num_generations=args.group_size,
        max_completion_length=args.new_tokens,
        temperature=1.0,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="grpo",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": args.dtype},
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=args.seed,
    )
    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter() - self.started)

    trainer = trl.GRPOTrainer(
        model=str(args.model),
        reward_funcs=last_number_reward,
        args=config,
        train_dataset=data,
        processing_class=transformers.AutoTokenizer.from_pretrained(args.model),
        callbacks=[Clock()],
    )
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "seconds": [round(t, 3) for t in times[args.warmup :]],
        "rewards": [round(float(entry["reward"]), 4) for entry in history],
        "mean_response_length": [
            round(float(entry["completions/mean_length"]), 2) for entry in history
        ],
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }


# --- ours --------------------------------------------------------------------------------------


def our_command(args: argparse.Namespace, run_name: str) -> list[str]:
    """``train.py`` on the same rows, without evaluation and checkpoints."""
    flags = {
        "hf-checkpoint": args.model,
        "prompt-data": args.data,
        "rm-type": "last_number",
        "rollout-batch-size": args.prompts,
        "n-samples-per-prompt": args.group_size,
        "rollout-max-response-len": args.new_tokens,
        "num-rollout": args.warmup + args.steps,
        "advantage-estimator": "grpo",
        "lr": 1e-5,
        "max-tokens-per-gpu": 2048,
        "train-dtype": args.dtype,
        "train-backend": "fsdp",
        "rollout-backend": "embedded",
        "actor-num-gpus-per-node": 1,
        "rollout-num-gpus": 1,
        "seed": args.seed,
        "rollout-seed": args.seed,
        "output-dir": args.output_dir,
        "run-name": run_name,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    switches = ["--apply-chat-template", "--rollout-shuffle", "--use-dynamic-batch-size"]
    return [
        sys.executable,
        str(CHECKOUT / "train.py"),
        *words,
        *switches,
        *shlex.split(args.our_flags),
    ]


def run_ours(args: argparse.Namespace, turn: int) -> dict[str, Any]:
    """One turn of ours; the figures are those of the run's ``metrics.jsonl``."""
    run_name = f"ours-{os.getpid()}-{turn}"
    words = our_command(args, run_name)
    print("ours:", shlex.join(words), flush=True)
    done = subprocess.run(
        words, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True, timeout=args.timeout
    )
    if done.returncode != 0:
        raise SystemExit(f"train.py ended with status {done.returncode}:\n{done.stdout[-4000:]}")
    rows = [
        json.loads(line)
        for line in (args.output_dir / run_name / "metrics.jsonl").read_text().splitlines()
    ]
    figures = our_figures(rows, args.warmup)
    print(f"ours: {figures['seconds']}", flush=True)
    return figures


def our_figures(rows: list[dict[str, Any]], warmup: int) -> dict[str, Any]:
    """Step times, rewards and the share of groups that training skipped, from the rows of
    ``metrics.jsonl``.
    """

    def series(name: str) -> list[float]:
        return [round(float(row[name]), 4) for row in rows if row.get(name) is not None]

    seconds = series("perf/step_time")
    if len(seconds) <= warmup:
        raise SystemExit(
            f"metrics.jsonl has {len(seconds)} rows with perf/step_time; need more than {warmup} "
            "warm-up steps"
        )
    skipped = sorted({name for row in rows for name in row if "skipped" in name})
    return {
        "seconds": seconds[warmup:],
        "rewards": series("rollout/raw_reward"),
        "mean_response_length": series("rollout/response_len/mean"),
        **{name: series(name) for name in skipped},
    }


# --- result ------------------------------------------------------------------------------------


def report(args: argparse.Namespace, turns: dict[str, list[dict[str, Any]]]) -> None:
    figures: dict[str, Any] = {
        "benchmark": "trl_step",
        "model": args.model.name,
        "dtype": args.dtype,
        "prompts": args.prompts,
        "group_size": args.group_size,
        "new_tokens": args.new_tokens,
        "threads": args.threads,
        "cores": len(os.sched_getaffinity(0)),
        "turns": turns,
    }
    for name, results in turns.items():
        seconds = [s for result in results for s in result["seconds"]]
        if seconds:
            figures[f"{name}_seconds_per_step"] = round(statistics.median(seconds), 3)
            print(
                f"{name:5s} median {statistics.median(seconds):7.2f} s/step over {len(seconds)} "
                f"steps ({min(seconds):.2f} to {max(seconds):.2f})")  # fmt: skip
    if {"trl_seconds_per_step", "ours_seconds_per_step"} <= set(figures):
        figures["speedup"] = round(
            figures["trl_seconds_per_step"] / figures["ours_seconds_per_step"], 2
        )
        print(f"ours is {figures['speedup']:.2f} times as fast per step")
    print(json.dumps(figures))


if __name__ == "__main__":
    sys.exit(main())
