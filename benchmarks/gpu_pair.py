"""Megatron with SGLang on two GPUs: one run of the quickstart's task, or of a model with experts,
and its figures.

    python benchmarks/gpu_pair.py colocated --model SMOLLM2_WITH_4_KV_HEADS --output DIR
    python benchmarks/gpu_pair.py async-killed --model MODEL --output DIR
    python benchmarks/gpu_pair.py resumed --model MODEL --output DIR        # goes on from what apart saved
    python benchmarks/gpu_pair.py routing --model QWEN3_MOE --output DIR    # one GPU; routing-off is the same without

| run | trainer | engine |
|---|---|---|
| colocated | Megatron, TP2 with sequence parallelism | SGLang, TP2, on the same two GPUs |
| colocated-fsdp | FSDP on two ranks | the same |
| apart | Megatron, one GPU | SGLang, the other GPU; weights over NCCL |
| async-killed | the same, ``train_async.py``, fully asynchronous | the same; killed once two steps are done |
| resumed | as colocated, from the last snapshot of apart | as colocated |
| routing, routing-off | Megatron, one GPU | SGLang on the same one; some answers are continued in the next rollout |
| routing-fsdp, routing-fsdp-off | FSDP, one GPU | the same |

``routing`` asks the engine once more for the experts of each finished sample, all tokens in one
request, and compares them with those that the run collected, apart for samples that were continued:
where rows are at wrong positions, they agree by chance only. Flags behind ``--`` go to ``train.py``
last. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
from given_lengths import LENGTHS
from run_processes import MARK, alive, command_line

CHECKOUT = Path(__file__).resolve().parents[1]
BENCHMARKS = CHECKOUT / "benchmarks"
POOL = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
TP2 = ("--tensor-model-parallel-size", 2, "--sequence-parallel")
ON_BOTH = ("--actor-num-gpus-per-node", 2, "--colocate", "--rollout-num-gpus-per-engine", 2)
ONE_EACH = ("--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1)
MEGATRON = ("--train-backend", "megatron")
TOLERANT = (
    "--use-fault-tolerance",
    "--rollout-health-check-interval",
    5,
    "--rollout-health-check-timeout",
    20,
)
ASYNC = ("--async-buffer-size", 2, "--rollout-function-path", POOL)
CONTINUED = (
    "--partial-rollout",
    "--over-sampling-batch-size",
    16,
    "--no-skip-zero-advantage-groups",
)
ROUTING = ("--actor-num-gpus-per-node", 1, "--colocate", *CONTINUED)
FSDP = ("--train-backend", "fsdp")
REPLAY = "--use-rollout-routing-replay"
RUNS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "colocated": ("train.py", (*MEGATRON, *TP2, *ON_BOTH, "--use-router")),
    "colocated-fsdp": ("train.py", (*FSDP, *ON_BOTH, "--use-router")),
    "apart": ("train.py", (*MEGATRON, *ONE_EACH, "--save-interval", 5)),
    "async-killed": ("train_async.py", (*MEGATRON, *ONE_EACH, *TOLERANT, *ASYNC)),
    "resumed": ("train.py", (*MEGATRON, *TP2, *ON_BOTH)),
    "routing": ("train.py", (*MEGATRON, *ROUTING, REPLAY)),
    "routing-off": ("train.py", (*MEGATRON, *ROUTING)),
    "routing-fsdp": ("train.py", (*FSDP, *ROUTING, REPLAY)),
    "routing-fsdp-off": ("train.py", (*FSDP, *ROUTING)),
}
STEPS = {"colocated": 30, "colocated-fsdp": 30, "apart": 10, "async-killed": 24, "resumed": 16}
KILLED_AFTER = 2  # steps
# tokens of the answers of routing: some are not done when a rollout has enough
UNEQUAL = "log-normal:48:192"


def parse_options() -> argparse.Namespace:
    words = sys.argv[1:]
    own, flags = (
        (words[: words.index("--")], words[words.index("--") + 1 :])
        if "--" in words
        else (words, [])
    )
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=sorted(RUNS))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--output", type=Path, default=Path("/tmp/gpu_pair"), help="folder for the runs and figures"
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="default: 30, 10 (apart), 16 (resumed), 24 (async-killed), 6 (routing…)",
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="the run is ended after this")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial of the script"
    )
    options = parser.parse_args(own)
    options.flags = flags
    options.model, options.output = options.model.resolve(), options.output.resolve()
    options.steps = options.steps or STEPS.get(options.what, 6)
    return options


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(options: argparse.Namespace) -> list[str]:
    """The words of the run; a later flag replaces an earlier one."""
    from slime.plugins.tools.commands.make_data import make_products

    train, held_out = make_products(options.output / "data", seed=1)
    given = argparse.Namespace(num_rollout=options.steps, seed=1, output_dir=options.output)
    flags: list[Any] = load(CHECKOUT / "scripts" / "quickstart" / "run.py").train_flags(
        given, options.model, train, held_out
    )
    script, own = RUNS[options.what]
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    flags += ["--train-dtype", dtype, "--rollout-dtype", dtype, "--rollout-backend", "sglang"]
    flags += ["--no-inline"]
    flags += ["--run-name", options.what, "--phase-timeout", int(options.seconds), *own]
    if options.device == "cuda":
        flags += [
            "--sglang-attention-backend",
            "triton",
            "--sglang-mem-fraction-static",
            0.4,
            "--no-compile-layers",
        ]
        flags += ["--sglang-cuda-graph-max-bs-decode", 64, "--sglang-disable-prefill-cuda-graph"]
        flags += ["--sglang-max-total-tokens", 131072]
    else:
        flags += ["--sglang-device", "cpu", "--sglang-max-total-tokens", 8192]
    saved = options.output / "checkpoints"
    if options.what == "apart":
        flags += ["--save", saved]
    elif options.what == "resumed":
        flags += ["--load", saved]
    elif options.what.startswith("routing"):
        flags = without_evaluation(flags)
        flags += ["--rollout-max-response-len", 192, "--rm-type", "random", "--lr", 1e-6]
        flags += ["--custom-generate-function-path", f"{BENCHMARKS / 'given_lengths.py'}:generate"]
    if options.what in ("routing", "routing-fsdp"):
        flags += ["--custom-rm-path", f"{BENCHMARKS / 'routing_reward.py'}:compare"]
    return [sys.executable, str(CHECKOUT / script), *map(str, flags), *options.flags]


def without_evaluation(flags: list[Any]) -> list[Any]:
    """The flags up to ``--eval-prompt-data``, with what follows its two values, and without an
    interval.
    """
    at = flags.index("--eval-prompt-data")
    flags = flags[:at] + flags[at + 3 :]
    at = flags.index("--eval-interval")
    return flags[:at] + flags[at + 2 :]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The run to its end; when it is late, it is asked to end, then killed with all that it
    started.
    """
    folder, mark = options.output / options.what, uuid.uuid4().hex
    shutil.rmtree(folder, ignore_errors=True)
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]))
    env = {
        **os.environ,
        MARK: mark,
        "PYTHONPATH": path,
        "ROUTING_FILE": str(options.output / "routing_rows.jsonl"),
    }
    env[LENGTHS] = UNEQUAL
    words = command(options)
    print(" ".join(words), flush=True)
    found: dict[str, Any] = {}
    started = time.time()
    child = subprocess.Popen(words, cwd=options.output, env=env)
    code: int | None = None
    while time.time() - started < options.seconds:
        try:
            code = child.wait(0.25)
            break
        except subprocess.TimeoutExpired:
            if (
                options.what == "async-killed"
                and "killed_at" not in found
                and len(steps_of(folder)) >= KILLED_AFTER
            ):
                found |= {
                    "killed_processes": kill_engine(mark),
                    "killed_at": round(time.time() - started, 1),
                }
    if code is None:
        print(f"not done after {options.seconds:.0f} s", flush=True)
        child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(20)
    found |= {"exit_code": code, "seconds": round(time.time() - started, 1), "started": started}
    until = time.monotonic() + 10
    while alive(mark) and time.monotonic() < until:
        time.sleep(0.25)
    left = alive(mark)
    found["left_processes"] = [" ".join(command_line(process))[:120] for process in left]
    for process in left:
        process.kill()
    return found


def kill_engine(mark: str) -> int:
    """SIGKILL to every process of the run's SGLang server; their number."""
    servers = [p for p in alive(mark) if {"--port", "--model-path"} <= set(command_line(p))]
    tree = {p.pid: p for server in servers for p in [server, *server.children(recursive=True)]}
    for process in tree.values():
        try:
            process.kill()
        except psutil.Error:
            continue
    return len(tree)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that belong to steps; a last line that is not complete yet is left
    out.
    """
    file = folder / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else []
    return [row for row in map(json.loads, lines) if "rollout/step" in row]


def figures(options: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    rows = steps_of(options.output / options.what)
    if not rows:
        return {}
    h200_train = load(BENCHMARKS / "h200_train.py")
    counted = rows[1:] or rows

    def over(name: str, how: Any = statistics.fmean) -> float | None:
        values = [float(row[name]) for row in counted if row.get(name) is not None]
        return round(how(values), 6) if values else None

    result = {
        "steps": [row["rollout/step"] for row in rows],
        "rewards": [round(float(row.get("rollout/raw_reward") or 0.0), 3) for row in rows],
        "times": h200_train.times(rows),
        "memory_gib": {
            phase: used.get("device") for phase, used in h200_train.memory(rows).items()
        },
        "logprob_gap": over("train/train_rollout_logprob_abs_diff"),
        "audit_gap": over("perf/audit_logprob_diff", max),
        "staleness_max": over("rollout/staleness/max", max),
        "several_versions_ratio": over("rollout/several_versions_ratio"),
        "engines_lost": over("rollout/engine_lost_count", sum),
    }
    summary = options.output / options.what / "summary.json"
    if summary.is_file():
        said = json.loads(summary.read_text(encoding="utf-8"))
        result |= {name: said.get(name) for name in ("accuracy_before", "accuracy_after")}
    if options.what == "async-killed":
        kill = load(BENCHMARKS / "kill_engine.py")
        shutil.copytree(
            options.output / options.what, options.output / "outputs" / "run", dirs_exist_ok=True
        )
        result["events"] = [
            (round(event["time"] - found["started"], 1), event["said"])
            for event in kill.timeline(options.output)
        ]
    if options.what in ("routing", "routing-fsdp"):
        result["routes"] = routes(options.output / "routing_rows.jsonl")
    return result


def routes(file: Path) -> dict[str, Any]:
    """Share of routes that the engine gives again when it is asked for all tokens of a sample at
    once.
    """
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    shares: dict[str, Any] = {}
    for name, chosen in (
        ("one_request", [line for line in lines if line["requests"] == 1]),
        ("continued", [line for line in lines if line["requests"] > 1]),
    ):
        rows = sum(line["rows"] for line in chosen)
        for key in ("same", "shifted"):
            shares[f"{name}_{key}"] = (
                round(sum(line[key] for line in chosen) / rows, 4) if rows else None
            )
        shares[f"{name}_samples"] = len(chosen)
    return shares


def main() -> None:
    options = parse_options()
    options.output.mkdir(parents=True, exist_ok=True)
    found = run(options)
    metrics = options.output / options.what / "metrics.jsonl"
    if metrics.is_file():
        shutil.copyfile(metrics, options.output / f"{options.what}_metrics.jsonl")
    result = {"benchmark": "gpu_pair", "what": options.what, "model": options.model.name, **found}
    result |= figures(options, found)
    line = json.dumps(result)
    (options.output / f"{options.what}.json").write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)
    raise SystemExit(0 if found["exit_code"] == 0 else 1)


if __name__ == "__main__":
    main()
