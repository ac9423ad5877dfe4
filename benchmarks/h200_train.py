"""``train.py`` colocated on one GPU with SGLang and FSDP: a reward curve, and where the time of a
step goes.

    python benchmarks/h200_train.py curve --model SMOLLM2_FOLDER
    python benchmarks/h200_train.py step --shape qwen3-4b --prompts gsm8k.jsonl
    python benchmarks/h200_train.py start --shape qwen3-4b --no-offload-train --sglang-mem-fraction-static 0.35

``curve``: the quickstart's data and batch, 30 steps; the curve as CSV and picture. ``step``: the
shape of a public model with random weights, 32 prompts x 8 samples of about 1024 tokens with random
rewards, a few steps; seconds by phase and memory after each. The first step compiles and is not
counted. The audit of weights is apart from the step. ``start``: one such step with empty caches of
compiled code, and again with those that the first run left; seconds from the command until the step
has ended. Flags that the script does not know go to ``train.py``. The last line is JSON.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "benchmarks")]

from energy import StepEnergy, counter  # noqa: E402

PHASES = ("rollout", "offload", "wake_up", "train", "update_weights", "sleep", "onload")
MEMORY_PHASES = ("rollout", "offload", "wake_up", "train", "update_weights", "sleep", "onload")
CURVE = (
    *(
        "rollout/raw_reward",
        "train/loss",
        "train/grad_norm",
        "train/train_rollout_logprob_abs_diff",
    ),
    *("perf/step_time", "perf/rollout_time", "perf/train_time", "perf/update_weights_time"),
)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("curve", "step", "start"))
    parser.add_argument(
        "--model", type=Path, help="folder; of `step` default: a random model, made where absent"
    )
    parser.add_argument(
        "--shape", default="qwen3-4b", help="of benchmarks/random_model.py, for `step` and `start`"
    )
    parser.add_argument(
        "--prompts", type=Path, help="GSM8K's rows, for `step`; default: made-up word problems"
    )
    parser.add_argument("--steps", type=int, help="default: 30, 4 for `step`, 1 for `start`")
    parser.add_argument("--response-tokens", type=int, default=784)
    parser.add_argument("--max-tokens-per-gpu", type=int, default=12288)
    parser.add_argument("--seconds", type=float, default=540.0, help="the run is ended after this")
    parser.add_argument("--rollout-backend", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("/tmp/h200_train"),
        help="folder for the run and its JSON",
    )
    parser.add_argument("--device", default="cuda", help="cpu for a trial of the script")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape and batch, for a trial")
    options, flags = parser.parse_known_args()
    options.flags = flags  # of train.py
    if options.tiny:
        options.shape = "tiny-qwen3.5-served" if "qwen3.5" in options.shape else "tiny"
        options.response_tokens, options.max_tokens_per_gpu = 12, 512
    if options.what == "curve" and options.model is None:
        parser.error("curve needs --model: a folder of SmolLM2-135M-Instruct")
    options.given = options.model is not None and (options.model / "config.json").is_file()
    options.model = (
        options.model.resolve() if options.model else Path("/tmp") / f"random-{options.shape}"
    )
    options.steps = options.steps or {"curve": 30, "step": 4, "start": 1}[options.what]
    options.output = options.output.resolve()
    return options


def engine_flags(options: argparse.Namespace, requests: int, fraction: float) -> list[Any]:
    on_cuda = options.device == "cuda"
    dtype = "bfloat16" if on_cuda else "float32"
    words = ["--train-backend", "fsdp", "--rollout-backend", options.rollout_backend, "--colocate"]
    words += ["--actor-num-gpus-per-node", 1, "--train-dtype", dtype, "--rollout-dtype", dtype]
    words += [
        "--output-dir",
        options.output,
        "--run-name",
        options.what,
        "--phase-timeout",
        options.seconds,
    ]
    if options.rollout_backend == "sglang" and on_cuda:
        words += ["--sglang-attention-backend", "triton", "--sglang-mem-fraction-static", fraction]
        words += [
            "--sglang-cuda-graph-max-bs-decode",
            requests,
            "--sglang-disable-prefill-cuda-graph",
        ]
    elif options.rollout_backend == "sglang":
        words += ["--sglang-device", "cpu", "--sglang-max-total-tokens", 8192]
    return words


def curve_flags(options: argparse.Namespace) -> list[Any]:
    """The quickstart's own, with SGLang and both on one GPU."""
    from slime.plugins.tools.commands.make_data import make_products

    spec = importlib.util.spec_from_file_location(
        "quickstart", CHECKOUT / "scripts" / "quickstart" / "run.py"
    )
    assert spec is not None and spec.loader is not None
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    train, held_out = make_products(options.output / "data", seed=1)
    given = argparse.Namespace(num_rollout=options.steps, seed=1, output_dir=options.output)
    return [
        *quickstart.train_flags(given, options.model, train, held_out),
        *engine_flags(options, 64, 0.5),
    ]


def step_flags(options: argparse.Namespace) -> list[Any]:
    prompts = 4 if options.tiny else 32
    samples = 4 if options.tiny else 8
    data = write_prompts(options, prompts * options.steps)
    words = [
        "--hf-checkpoint",
        options.model,
        "--prompt-data",
        data,
        "--rollout-batch-size",
        prompts,
    ]
    words += [
        "--n-samples-per-prompt",
        samples,
        "--rollout-max-response-len",
        options.response_tokens,
    ]
    words += [
        "--num-rollout",
        options.steps,
        "--use-dynamic-batch-size",
        "--lr",
        1e-6,
        "--rm-type",
        "random",
    ]
    words += ["--max-tokens-per-gpu", options.max_tokens_per_gpu, "--no-skip-zero-advantage-groups"]
    return [*words, *engine_flags(options, prompts * samples, 0.8)]


def write_prompts(options: argparse.Namespace, count: int) -> Path:
    """Questions of GSM8K; without its file word problems of the same length (some 235 letters)."""
    rows: list[dict[str, str]] = []
    if options.prompts and options.prompts.is_file():
        for line in options.prompts.read_text(encoding="utf-8").splitlines()[:count]:
            row = json.loads(line)
            question = row.get("question") or row.get("prompt") or next(iter(row.values()))
            rows.append({"prompt": str(question), "label": "0"})
    rng = random.Random(0)
    names, things = ("Ann", "Ben", "Cleo", "Dan"), ("apples", "books", "coins", "shells")
    while len(rows) < count:
        a, b, c = (rng.randint(2, 99) for _ in range(3))
        who, what = rng.choice(names), rng.choice(things)
        text = (
            f"{who} has {a} {what} and buys {b} more every week for {c} weeks. After that {who} "
            f"gives a third of all {what} to a friend and shares the rest between two boxes, and "
            f"then finds {rng.randint(1, 9)} {what} on the way home. How many {what} are in each "
            "box?"
        )
        rows.append({"prompt": text, "label": "0"})
    path = options.output / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run_train(
    options: argparse.Namespace, flags: list[Any], environment: dict[str, str]
) -> tuple[int, float | None]:
    """Run ``train.py`` in a session of its own; ask it to end at the deadline, then kill it with
    all it started.

    Returns:
        Its exit status, and the seconds from the command until the first step had ended; None if it
        had not.
    """
    shutil.rmtree(options.output / options.what, ignore_errors=True)
    command = [sys.executable, str(CHECKOUT / "train.py"), *map(str, flags), *options.flags]
    print(" ".join(command), flush=True)
    path = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    child = subprocess.Popen(
        command,
        cwd=options.output,
        env={**os.environ, **environment, "PYTHONPATH": path},
        start_new_session=True,
    )
    started = time.monotonic()
    deadlines = [
        (started + options.seconds, signal.SIGTERM),
        (started + options.seconds + 30.0, signal.SIGKILL),
    ]
    first_step: float | None = None
    while (code := child.poll()) is None:
        if first_step is None and read_steps(options.output / options.what):
            first_step = round(time.monotonic() - started, 1)
        if deadlines and time.monotonic() > deadlines[0][0]:
            print(f"train.py is not done after {time.monotonic() - started:.0f} s", flush=True)
            os.killpg(child.pid, deadlines.pop(0)[1])
        time.sleep(0.2)
    return code, first_step


def run_starts(options: argparse.Namespace, flags: list[Any]) -> dict[str, Any]:
    """Run one step with empty caches of compiled code, then again with what the first run left in
    them.
    """
    caches = options.output / "caches"
    shutil.rmtree(caches, ignore_errors=True)
    folders = {"HOME": "home", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    environment = {name: str(caches / folder) for name, folder in folders.items()}
    for folder in environment.values():
        Path(folder).mkdir(parents=True)
    result: dict[str, Any] = {
        "benchmark": "h200_train",
        "what": "start",
        "model": options.model.name,
    }
    for name in ("empty_caches", "filled_caches"):
        code, seconds = run_train(options, flags, environment)
        row = (read_steps(options.output / options.what) or [{}])[0]
        phases = {
            phase: row.get(f"perf/{phase}_time") for phase in ("update_weights", "rollout", "train")
        }
        result[name] = {"exit_code": code, "first_step_at_seconds": seconds, "phases": phases}
        # with the logs of its processes, which say where the seconds went
        kept = options.output / f"start_{name}"
        shutil.rmtree(kept, ignore_errors=True)
        (options.output / options.what).rename(kept)
    return result


def read_steps(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    if not file.is_file():
        return []
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "rollout/step" in row]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *CURVE])
        for row in rows:
            writer.writerow([row["rollout/step"], *(row.get(name, "") for name in CURVE)])


def times(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the steps but the first, in seconds; the audit apart."""
    counted = rows[1:] or rows

    def median(name: str) -> float:
        return round(statistics.median(row.get(name) or 0.0 for row in counted), 3)

    phases = {name: median(f"perf/{name}_time") for name in PHASES}
    audit = median("perf/audit_weights_time") + median("perf/update_weights_audit_time")
    # The digests are compared within the phase update_weights.
    phases["update_weights"] = round(
        phases["update_weights"] - median("perf/update_weights_audit_time"), 3
    )
    step = median("perf/step_time")
    without = step - audit
    useful = phases["rollout"] + phases["train"]
    return {
        "step_seconds": step,
        "audit_seconds": round(audit, 3),
        "phases": phases,
        "other_seconds": round(without - sum(phases.values()), 3),
        "generation_and_training_share": round(useful / without, 4) if without else 0.0,
        "first_step_seconds": round(rows[0].get("perf/step_time") or 0.0, 3),
        "weight_sync_pause_seconds": median("perf/update_weights_pause_time"),
        "tokens_per_gpu_per_second_rollout": median("perf/tokens_per_gpu_per_sec"),
        "tokens_per_second_train": median("perf/actor_train_tok_per_s"),
        "response_tokens": median("rollout/response_len/mean"),
        "logprob_gap": median("train/train_rollout_logprob_abs_diff"),
    }


def memory(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """GiB after each phase of every step: on the device, and tensors of the trainer."""
    table: dict[str, Any] = {}
    for phase in MEMORY_PHASES:
        for what in ("device", "tensors", "reserved", "process"):
            values = [
                round(row[f"memory/{phase}/{what}"], 2)
                for row in rows
                if f"memory/{phase}/{what}" in row
            ]
            if values:
                table.setdefault(phase, {})[what] = values
    return table


def report(result: dict[str, Any]) -> None:
    timing = result["times"]
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in timing["phases"].items())
    print(
        f"{result['what']}: {result['steps']} steps; step {timing['step_seconds']:.2f} s "
        f"({phases}, other {timing['other_seconds']:.2f}; audit {timing['audit_seconds']:.2f} "
        f"apart); generation + training {timing['generation_and_training_share']:.1%}"
    )
    rewards = result["rewards"]
    print("reward: " + " ".join(f"{reward:.2f}" for reward in rewards))
    for phase, used in result["memory_gib"].items():
        print(
            f"memory after {phase:15} "
            + "  ".join(f"{what} {values}" for what, values in used.items())
        )


def main() -> None:
    options = parse_options()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if options.what != "curve" and not options.given:  # a model that is there is never written over
        from random_model import write_model

        write_model(options.shape, options.model)
    flags = curve_flags(options) if options.what == "curve" else step_flags(options)
    if options.what == "start":
        starts = run_starts(options, flags)
        line = json.dumps(starts)
        (options.output / "h200_train_start.json").write_text(line + "\n")
        print(line, flush=True)
        raise SystemExit(
            max(starts[name]["exit_code"] for name in ("empty_caches", "filled_caches"))
        )
    started = time.time()
    folder = options.output / options.what
    # NVML counts the machine's GPUs, whatever this process may see of them.
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    read = counter(int(gpu)) if options.device == "cuda" and gpu.isdigit() else None
    with StepEnergy(lambda: len(read_steps(folder)), read) as energy:
        code, first_step = run_train(options, flags, {})
    rows = read_steps(folder)
    if not rows:
        raise SystemExit(
            f"train.py ended with {code} before its first step; logs: {folder / 'logs'}"
        )
    write_csv(options.output / f"{options.what}.csv", rows)
    result = {
        "benchmark": "h200_train",
        "what": options.what,
        "model": options.model.name,
        "rollout_backend": options.rollout_backend,
        "exit_code": code,
        "steps": len(rows),
        "samples_per_step": rows[0].get("train/global_batch_size"),
        "seconds": round(time.time() - started, 1),
        "first_step_at_seconds": first_step,
        "rewards": [round(float(row.get("rollout/raw_reward") or 0.0), 4) for row in rows],
        "times": times(rows),
        "memory_gib": memory(rows),
        "kilojoules": energy.kilojoules(warmup=1),
    }
    summary = folder / "summary.json"
    if summary.is_file():
        said = json.loads(summary.read_text(encoding="utf-8"))
        result |= {name: said.get(name) for name in ("accuracy_before", "accuracy_after")}
    for name in ("metrics.jsonl", "reward_curve.png"):
        if (folder / name).is_file():
            shutil.copy2(folder / name, options.output / f"{options.what}_{name}")
    report(result)
    line = json.dumps(result)
    (options.output / f"h200_train_{options.what}.json").write_text(line + "\n")
    print(line, flush=True)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
