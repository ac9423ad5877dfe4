"""Write the table of predicted and measured rows into benchmarks/plan.md: python tools/plan_page.py

The rows are those of benchmarks/results. Each says what was run; nothing here is fitted to a row.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import exp
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from random_model import SHAPES  # noqa: E402

from slime.config.layout import ParallelLayout  # noqa: E402
from slime.plugins.tools.plan.layouts import setting, steady, step_tokens  # noqa: E402
from slime.plugins.tools.plan.memory import GATHERED_BUCKETS, train_memory  # noqa: E402
from slime.plugins.tools.plan.plan import Run, make_plan  # noqa: E402
from slime.plugins.tools.plan.seconds import decode_seconds, train_seconds  # noqa: E402
from slime.plugins.tools.plan.setups import (  # noqa: E402  # noqa: E402
    GIB,
    KINDS,
    EngineSetup,
    Packs,
    Placement,
    PlannedModel,
    TrainSetup,
    Workload,
)
from slime.plugins.tools.plan.simulation import SYNCHRONOUS, Mode, simulate  # noqa: E402

RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "plan.md"
BEGIN, END = "<!-- table: python tools/plan_page.py -->", "<!-- end of the table -->"
H200 = KINDS["h200"]
TRAINING = (
    "h200_train_mfu_fsdp.json",
    "h200_train_mfu_gpus.jsonl",
    "h200_train_mfu_megatron.jsonl",
    "h200_train_mfu_november_23.jsonl",
    "h200_train_mfu_one_gpu.jsonl",
    "h200_optimizer_cpu_offload_november_30.jsonl",
    "h200_train_mfu_november_26.jsonl",
    "h200_train_mfu_november_26_later.jsonl",
    "h200_train_mfu_november_26_night.jsonl",
    "h200_train_mfu_november_27.jsonl",
    "h200_train_mfu_november_28.jsonl",
    "h200_train_mfu_november_29.jsonl",
)
OLD_EXPERTS = "kernels of experts that have been replaced"
OTHER_EXPERTS = "the rates of experts are those of Megatron's kernels"
FLOAT8 = "the seconds are those without it"
STATE_ON_CPU = "Adam had 4 threads; the only row with the state on the CPU"
OLD_UPDATE_WAIT = 1.0
"""Seconds that SGLang itself waited in an update that interrupts requests, when
h200_async_two_gpus was measured. Today's syncs pause it for 0.04 to 0.08 s (h200_busy_syncs).
"""
EAGER = 9.75 * GIB
"""NCCL's memory before communicators were made at their first use (h200_nccl_memory: 10.35 with the
context).
"""


@dataclass(frozen=True)
class Row:
    """One measured figure and its prediction.

    Attributes:
        outside: Why the figure is not held to the tolerance; empty if it is.
    """

    file: str
    what: str
    figure: str
    predicted: float
    measured: float
    outside: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def tolerance(self) -> float:
        return 0.10 if self.figure.startswith("GiB") else 0.20


def model(shape: str) -> PlannedModel:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        found = PlannedModel.from_checkpoint(folder)
    assert found is not None
    return found


def read(name: str) -> list[dict[str, Any]]:
    text = (RESULTS / name).read_text(encoding="utf-8")
    return (
        [json.loads(text)]
        if name.endswith(".json")
        else [json.loads(line) for line in text.splitlines()]
    )


@cache
def rows() -> tuple[Row, ...]:
    """All rows of H200s that say what was run."""
    return tuple(_rows())


def _rows() -> Iterator[Row]:
    for name in TRAINING:
        for row in read(name):
            overlapped = "--tp-comm-overlap" in row.get("flags", ())
            if row["shape"] in SHAPES and not overlapped and not row.get("disturbed"):
                yield from _training(name.partition(".")[0], row)
    for path in sorted(RESULTS.glob("h200_release_*.json")):
        for part in json.loads(path.read_text(encoding="utf-8"))["parts"].values():
            if part["status"] == "exit 0" and part["figures"]["benchmark"] == "train_mfu":
                yield from _training(path.stem, part["figures"])
    yield from _decoding()
    yield from _colocated_step()
    yield from _recipe()
    yield from _asynchronous()


def _training(file: str, row: dict[str, Any]) -> Iterator[Row]:
    shape, given, tokens = model(row["shape"]), row["flags"], row["tokens_per_micro_batch"]

    def number(flag: str, default: int) -> int:
        return int(given[given.index(flag) + 1]) if flag in given else default

    layout = ParallelLayout(
        world_size=row["gpus"],
        tp=(tp := number("--tensor-model-parallel-size", 1)),
        etp=number("--expert-tensor-parallel-size", tp),
        ep=number("--expert-model-parallel-size", 1),
    )
    recomputed = number("--recompute-num-layers", -1 if row["recompute"] else 0)
    train = TrainSetup(
        row["backend"],
        layout,
        tokens,
        recomputed=recomputed,
        gradient_bytes=2 if "--grad-reduce-in-bf16" in given else 4,
        optimizer_on_cpu="--optimizer-cpu-offload" in given,
        distributed_optimizer="--use-distributed-optimizer" in given,
        reshard="--no-fsdp-reshard-after-forward" not in given,
        lora_rank=number("--lora-rank", 0),
        master_bytes=2.0 if "--bf16-master-weights" in given else 4.0,
        moment_bytes=2.0 if "--optimizer-8bit" in given else 8.0,
        state_on_cpu="--fsdp-cpu-offload" in given,
        inputs_on_cpu="--offload-activations" in given,
        float8="--float8-training" in given,
    )
    length = row.get("sample_tokens", 1024)
    count = max(tokens // length, 1)
    # make_batch of train_mfu.py: prompts of 256 tokens, lengths uniform within (length - 256) / 2
    # of the mean
    squares = 1 + ((length - 256) / 2 / length) ** 2 / 3 if count > 1 else 1.0
    batch = Packs(row["micro_batches"], tokens, tokens - 256 * count, length, squares)
    seconds = train_seconds(shape, H200, train, batch)
    sizes = " ".join(
        f"{name}{size}"
        for name, size in (("TP", layout.tp), ("EP", layout.ep), ("DP", layout.dp))
        if size > 1
    )
    how = {0: "", -1: ", recomputed"}.get(recomputed, f", {recomputed} layers recomputed")
    what = (
        f"{row['backend']} {row['shape']} {sizes or 'one GPU'}, {tokens // 1024}k x "
        f"{row['micro_batches']}"
    )
    what += f", samples of {length // 1024}k{how}" + "".join(
        f", {f}"
        for f in given
        if any(word in f for word in ("offload", "reshard", "lora", "8bit", "bf16-m", "float8"))
    )
    old = (
        OLD_EXPERTS
        if SHAPES[row["shape"]].get("num_experts") and row.get("code") != "after"
        else ""
    )
    alone = "the only row with Adam on the CPU: it gives the rate" if train.optimizer_on_cpu else ""
    no_rate = (
        OTHER_EXPERTS
        if SHAPES[row["shape"]].get("num_experts") and row["backend"] == "fsdp"
        else ""
    )
    no_rate = FLOAT8 if train.float8 else no_rate
    peak = train_memory(shape, train, batch).peak / GIB
    yield Row(
        file, what, "GiB, peak", peak, row["peak_gib"], STATE_ON_CPU if train.state_on_cpu else ""
    )
    why = old or alone or no_rate or (STATE_ON_CPU if train.state_on_cpu else "")
    yield Row(file, what, "s, train", seconds.step, statistics.median(row["train_seconds"]), why)
    yield Row(
        file,
        what,
        "s, log-probs",
        seconds.scoring,
        statistics.median(row["log_probs_seconds"]),
        old or no_rate,
    )


def _asynchronous() -> Iterator[Row]:
    """``async_run.py --device cuda --tail 192``: lengths of ``long_tail.py``, prompts of about 40
    tokens.

    The trainer's layers were not compiled, and its steps took 4.7 s in all modes. They are taken as
    measured, so that the rows show the simulation of the engine and of the scheduling.
    """
    row = read("h200_async_two_gpus.json")[0]
    median, count, steps = row["tail"], 512, row["steps"]
    mean = median * exp(0.5)
    work = Workload(64, 8, 40, mean, 16 * median, 1.0)
    train = TrainSetup("fsdp", ParallelLayout(), compiled=False)
    planned = Run(
        model("qwen3-0.6b"), H200, train, EngineSetup(fraction=0.5), Placement(colocate=False), work
    )
    modes = {
        "sync": SYNCHRONOUS,
        "one-step": Mode("one-step", "rollouts", 1, 1),
        "fully-async": Mode("fully asynchronous", buffer=2, interval=1),
        "fully-async-4-2": Mode("fully asynchronous"),
    }
    trained = next(run["training_seconds"] for run in row["runs"] if run["kind"] == "sync") / steps
    for run in row["runs"]:
        what = f"qwen3-0.6b, a GPU for each side, {run['kind']}, {count} log-normal responses"
        yield Row(
            "h200_async_two_gpus",
            what,
            "s, step",
            _step(planned, modes[run["kind"]], trained),
            run["step_seconds"],
        )


@cache
def _step(run: Run, mode: Mode, trained: float) -> float:
    made, _ = setting(make_plan(run), mode)
    if mode.ahead == "groups":
        made = replace(made, update_seconds=made.update_seconds + OLD_UPDATE_WAIT)
    return steady(simulate(made, mode, trained / step_tokens(made)))


def _decoding() -> Iterator[Row]:
    """SGLang at 256 requests of 256 and 1,024 tokens; their mean context is 256 + 512."""
    row = read("h200_rollout_throughput.json")[0]
    running, context = row["concurrency"], row["input_tokens"] + row["output_tokens"] / 2
    seconds = decode_seconds(model(row["shape"]), H200, EngineSetup(), running, context)
    took = row["turns"]["ours"][0]["seconds"]
    yield Row(
        "h200_rollout_throughput",
        f"{row['shape']}, {running} requests at once",
        "s, generate",
        seconds * row["requests"] * row["output_tokens"] / running,
        took,
    )


def _colocated_step() -> Iterator[Row]:
    """``h200.py --parts step``; its flags are those of step_flags in h200_train.py."""
    first, _, resident = read("h200_step_november_26.jsonl")
    for row, fraction, offload in ((first, 0.8, True), (resident, 0.35, False)):
        work = Workload(32, 8, 1035.3 - 784, row["times"]["response_tokens"], 784)
        train, place = TrainSetup("fsdp", ParallelLayout(), 12288), Placement(offload_train=offload)
        run = Run(model("qwen3-4b"), H200, train, EngineSetup(fraction=fraction), place, work)
        what = f"fsdp qwen3-4b with SGLang, one GPU{'' if offload else ', nothing offloaded'}"
        yield from _whole("h200_step_november_26", what, run, row["times"], row["memory_gib"])


def _whole(
    file: str, what: str, run: Run, times: dict[str, Any], memory: dict[str, Any], nccl: float = 0.0
) -> Iterator[Row]:
    plan = make_plan(run)
    phases = {phase.name: phase.total / GIB for phase in plan.phases}
    # it has released its buckets when memory is measured
    if run.train is not None and run.train.backend == "fsdp":
        phases["weight sync"] -= GATHERED_BUCKETS / GIB
    yield Row(file, what, "s, generate", plan.seconds["generate"], times["phases"]["rollout"])
    yield Row(file, what, "s, step", plan.step, times["step_seconds"])
    # Measured after a phase, so the trainer's state without its activations: that of the phase
    # "save".
    for name, phase in (
        ("generate", "rollout"),
        ("save", "train"),
        ("weight sync", "update_weights"),
    ):
        extra = nccl / GIB
        yield Row(
            file, what, f"GiB after {phase}", phases[name] + extra, memory[phase]["device"][-1]
        )


def _recipe() -> Iterator[Row]:
    """``scripts/run-qwen3-4B.sh`` on two GPUs; communicators were made at the start in that
    code.
    """
    steps = [row for row in read("h200_recipe_qwen3_4b_metrics.jsonl") if "rollout/step" in row][1:]

    def median(name: str) -> float:
        return statistics.median(row[name] for row in steps)

    response = median("rollout/response_len/mean")
    work = Workload(32, 8, median("rollout/total_lengths") - response, response, 784)
    train = TrainSetup("megatron", ParallelLayout(world_size=2, tp=2), 9216, recomputed=-1)
    run = Run(model("qwen3-4b"), H200, train, EngineSetup(gpus=2, fraction=0.7), Placement(), work)
    times = {
        "phases": {"rollout": median("perf/rollout_time")},
        "step_seconds": median("perf/step_time"),
    }
    memory = {
        phase: {"device": [median(f"memory/{phase}/device")]}
        for phase in ("rollout", "train", "update_weights")
    }
    from slime.plugins.tools.plan.memory import COMMUNICATORS

    yield from _whole(
        "h200_recipe_qwen3_4b_metrics",
        "megatron qwen3-4b TP2 with SGLang TP2",
        run,
        times,
        memory,
        EAGER - COMMUNICATORS,
    )


def table() -> list[str]:
    """The table in Markdown, of the rows whose code still exists."""
    lines = [
        "| measured in | what | figure | predicted | measured | difference |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows():
        if row.outside == OLD_EXPERTS:
            continue
        shown = f"{row.error:+.0%}" + (f" (outside: {row.outside})" if row.outside else "")
        digits = 1 if row.measured >= 10 else 3
        values = f"{row.predicted:.{digits}f} | {row.measured:.{digits}f}"
        lines.append(f"| `{row.file}` | {row.what} | {row.figure} | {values} | {shown} |")
    return lines


def page(text: str) -> str:
    """Return the page with today's table."""
    before, _, rest = text.partition(BEGIN)
    return "\n".join([before + BEGIN, *table(), END]) + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
