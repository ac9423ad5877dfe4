"""The measurements of a GPU machine in one call: parts in sequence, each with a deadline; a short
table at the end.

    python benchmarks/h200.py --release --gpus 2 --smollm2 FOLDER --output results
    python benchmarks/h200.py --release --parts step,mfu,mfu_gpus --gpus 2 --at-once 4 --output results
    python benchmarks/h200.py --parts mfu,rollout,colocate --output results
    python benchmarks/h200.py --parts curve,step --smollm2 FOLDER --gsm8k train.jsonl --output results
    python benchmarks/h200.py --parts mfu,start,adapter,mfu_experts_gpus --at-once 4 --output results

With ``--at-once N`` parts share N GPUs (the first of CUDA_VISIBLE_DEVICES, if it is set), each as
soon as those that it needs are free, so the seconds
of a start, which need many CPU cores, are those of a busy machine.
``--release`` measures, in at most 30 minutes, what the pages show: the parts for one GPU one after
the other, and with ``--gpus 2`` or more those for several; or those of ``--parts``. Its table is
``h200_release_<date>.json``, from which ``tools/figures.py`` writes the pages.
A part that fails or hangs costs its own figures only. The table goes to the terminal, all figures
with commit, date and card to ``h200_<parts>.json``, the end of every part's output to the ``.log``
of the same name. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
BENCHMARKS = CHECKOUT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from recipes import Slots  # noqa: E402

LOG_BYTES = 12_000
KEPT = ("*.csv", "*_metrics.jsonl", "*_reward_curve.png")
MEMORY_SECONDS = 30.0
MARK = "SLIME_BENCHMARK_PART"

Figures = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One measurement. ``command`` makes its words from the options and a folder of its own."""

    seconds: float
    command: Callable[[argparse.Namespace, Path], list[Any]]
    show: Callable[[Figures], str]


def script(
    name: str, *words: Any, flags: tuple[Any, ...] = ()
) -> Callable[[argparse.Namespace, Path], list[Any]]:
    """One of the scripts; ``flags`` are the trainer's."""

    def command(options: argparse.Namespace, folder: Path) -> list[Any]:
        own = [sys.executable, BENCHMARKS / name, *words, "--output", folder, *trial(options)]
        return [*own, *(("--", *flags) if flags else ())]

    return command


def trial(options: argparse.Namespace) -> list[str]:
    return ["--device", "cpu", "--tiny"] if options.device == "cpu" else []


def several_gpus(
    *words: Any, flags: tuple[Any, ...] = ()
) -> Callable[[argparse.Namespace, Path], list[Any]]:
    """``train_mfu.py`` under torchrun; ``flags`` are the trainer's."""

    def command(options: argparse.Namespace, folder: Path) -> list[Any]:
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            options.gpus,
        ]
        measured = [BENCHMARKS / "train_mfu.py", *words, "--output", folder, *trial(options)]
        return [*launch, *measured, *(("--", *flags) if flags else ())]

    return command


def curve(options: argparse.Namespace, folder: Path) -> list[Any]:
    return [
        *script("h200_train.py", "curve", "--seconds", 260)(options, folder),
        "--model",
        options.smollm2,
    ]


def step(options: argparse.Namespace, folder: Path) -> list[Any]:
    engine = ("--rollout-backend", "embedded") if options.device == "cpu" else ()
    words = script("h200_train.py", "step", "--seconds", 480, *engine)(options, folder)
    return [*words, "--prompts", options.gsm8k] if options.gsm8k else words


def machine_gpus(count: int) -> list[str]:
    """The numbers of the first ``count`` GPUs of this machine, or of those that this process may
    see."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",")[:count] if seen else [str(number) for number in range(count)]


def recipes(options: argparse.Namespace, folder: Path) -> list[Any]:
    """A real model on the GPUs of the part; the runs share them."""
    words: list[Any] = ["--model", options.smollm2, "--at-once", 2]
    if options.at_once == 1:  # otherwise the one that this part may see
        words += ["--gpus", ",".join(machine_gpus(options.gpus if options.release else 1))]
    words += ["--only", "grpo,lora,ppo", "--output", folder, "--seconds", 480]
    words += ["--device", options.device] + (["--steps", 2] if options.device == "cpu" else [])
    return [sys.executable, BENCHMARKS / "recipes.py", *words]


def weight_sync(options: argparse.Namespace, folder: Path) -> list[Any]:
    return [sys.executable, BENCHMARKS / "weight_sync.py", *trial(options)]


def kill_engine(options: argparse.Namespace, folder: Path) -> list[Any]:
    own = ["--device", "cpu", "--shape", "tiny"] if options.device == "cpu" else []
    return [sys.executable, BENCHMARKS / "kill_engine.py", *own, "--output", folder]


def cuda_tests(options: argparse.Namespace, folder: Path) -> list[Any]:
    tests = [
        CHECKOUT / "tests" / "backends",
        CHECKOUT / "tests" / "models",
        CHECKOUT / "tests" / "plugins" / "megatron",
        CHECKOUT / "tests" / "weights",
    ]
    flags = ["-m", "cuda", "-q", "-p", "no:cacheprovider", "--rootdir", CHECKOUT, "--tb=short"]
    return [sys.executable, "-m", "pytest", *flags, *tests]


def show_mfu(f: Figures) -> str:
    expected = f["expected_gib"]
    return (
        f"MFU {f['train_mfu']:.1%}, log-probs {f['log_probs_mfu']:.1%} of {f['matmul_tflops']} "
        f"TFLOP/s; {f['train_tokens_per_gpu_per_second']:.0f} tokens/s/GPU; peak {f['peak_gib']} "
        f"GiB, must {expected['sum']}"
    )


def show_step(f: Figures) -> str:
    t = f["times"]
    phases = " ".join(f"{name} {seconds:.2f}" for name, seconds in t["phases"].items())
    share = t["generation_and_training_share"]
    return (
        f"{f['steps']} steps, exit {f['exit_code']}; {t['step_seconds']:.2f} s: {phases} other "
        f"{t['other_seconds']:.2f}; audit {t['audit_seconds']:.2f} apart; generation + training "
        f"{share:.1%}"
    )


def show_start(f: Figures) -> str:
    runs = {name.replace("_", " "): f[name] for name in ("empty_caches", "filled_caches")}
    return "first step ended after " + ", ".join(
        f"{r['first_step_at_seconds']} s ({name})" for name, r in runs.items()
    )


def show_curve(f: Figures) -> str:
    rewards = " ".join(
        f"{reward:.2f}" for reward in f["rewards"][:: max(len(f["rewards"]) // 10, 1)]
    )
    return (
        f"reward {rewards}; held out {f['accuracy_before']} -> {f['accuracy_after']}; "
        f"{show_step(f)}"
    )


def show_recipes(f: Figures) -> str:
    return "; ".join(
        f"{row['recipe']} {row.get('accuracy_before')} -> {row.get('accuracy_after')}"
        for row in f["recipes"]
    )


def show_colocate(f: Figures) -> str:
    return (
        f"engine {f['engine_gb']} GB -> {f['residue_gb']} GB; release + resume "
        f"{f['release_and_resume_seconds']} s; same text {f['text_equal']}; grown {f['grown_gb']} "
        "GB"
    )


def show_rollout(f: Figures) -> str:
    return (
        f"{f['ours_tokens_per_second']:.0f} / {f['raw_tokens_per_second']:.0f} tokens/s: ratio "
        f"{f['ratio']:.3f}"
    )


def show_any(f: Figures) -> str:
    return json.dumps(f)[:600]


def shown(name: str, outcome: Figures) -> str:
    """Its line of the table. A part that was ended has said something else last, or nothing."""
    show = PARTS[name].show if outcome["status"] == "exit 0" else show_any
    return show(outcome["figures"]) if outcome["figures"] else "no figures"


MEGATRON = ("--backend", "megatron")
EXPERTS = (*MEGATRON, "--tokens", 8192, "--recompute", "--shape")
IN_BF16 = ("--grad-reduce-in-bf16",)
EP4 = ("--expert-model-parallel-size", 4, "--use-distributed-optimizer", *IN_BF16)
EXPERTS_OF_FSDP = (
    "--bf16-master-weights",
    "--optimizer-8bit",
    "--no-fsdp-reshard-after-forward",
    *IN_BF16,
)
NOTHING_OFFLOADED = ("--no-offload-train", "--sglang-mem-fraction-static", 0.35)
ADAPTER = ("--lora-rank", 16, "--lora-sync", "adapter")
FEW_SAMPLES = (
    "--rollout-batch-size",
    8,
    "--n-samples-per-prompt",
    8,
    "--response-tokens",
    256,
    "--steps",
    2,
)
TP2 = ("--tensor-model-parallel-size", 2, "--sequence-parallel", "--use-distributed-optimizer")
PARTS: dict[str, Part] = {
    "cuda_tests": Part(150, cuda_tests, show_any),
    "mfu": Part(240, script("train_mfu.py"), show_mfu),
    "mfu_4_micro_batches": Part(
        240, script("train_mfu.py", "--micro-batches", 4, "--steps", 3), show_mfu
    ),
    "mfu_not_compiled": Part(
        200, script("train_mfu.py", "--no-compile", "--recompute", "--steps", 3), show_mfu
    ),
    "mfu_gpus": Part(300, several_gpus(), show_mfu),
    "mfu_megatron": Part(300, script("train_mfu.py", *MEGATRON), show_mfu),
    "mfu_megatron_experts": Part(
        300, script("train_mfu.py", *EXPERTS, "qwen3-30b-a3b-10-layers", flags=IN_BF16), show_mfu
    ),
    "mfu_megatron_experts_gpus": Part(
        500, several_gpus(*EXPERTS, "qwen3-30b-a3b", "--micro-batches", 4, flags=EP4), show_mfu
    ),
    "mfu_experts_gpus": Part(
        400,
        several_gpus(
            *("--shape", "qwen3-30b-a3b", "--no-checkpoint", "--recompute"),
            *("--tokens", 32768, "--micro-batches", 4, "--steps", 3),
            flags=EXPERTS_OF_FSDP,
        ),
        show_mfu,
    ),
    "mfu_delta_nets": Part(
        400,
        script(
            "train_mfu.py",
            *("--shape", "qwen3.5-4b", "--tokens", 8192, "--micro-batches", 8, "--steps", 3),
            flags=("--no-fsdp-reshard-after-forward",),
        ),
        show_mfu,
    ),
    "mfu_megatron_gpus": Part(300, several_gpus(*MEGATRON, flags=TP2), show_mfu),
    "rollout": Part(420, script("rollout_throughput.py", "--seconds", 260), show_rollout),
    "colocate": Part(240, script("colocate.py"), show_colocate),
    "curve": Part(300, curve, show_curve),
    "step": Part(520, step, show_step),
    "start": Part(
        560, script("h200_train.py", "start", *NOTHING_OFFLOADED, "--seconds", 260), show_start
    ),
    "adapter": Part(
        400,
        script(
            *(
                "h200_train.py",
                "step",
                "--shape",
                "qwen3-8b",
                "--steps",
                3,
                "--seconds",
                380,
                *ADAPTER,
            ),
            *(*NOTHING_OFFLOADED, "--no-offload-rollout"),
        ),
        show_step,
    ),
    "adapter_32b": Part(
        560,
        script(
            *(
                "h200_train.py",
                "step",
                "--shape",
                "qwen3-32b",
                "--seconds",
                540,
                *ADAPTER,
                *FEW_SAMPLES,
            ),
            *(
                "--gradient-checkpointing",
                "--max-tokens-per-gpu",
                4096,
                "--sglang-mem-fraction-static",
                0.6,
            ),
        ),
        show_step,
    ),
    "step_delta_nets": Part(
        560,
        script(
            *(
                "h200_train.py",
                "step",
                "--shape",
                "qwen3.5-4b-served",
                "--seconds",
                540,
                *FEW_SAMPLES,
            ),
            *("--max-tokens-per-gpu", 8192, "--sglang-mem-fraction-static", 0.7),
        ),
        show_step,
    ),
    "mfu_0.6b": Part(160, script("train_mfu.py", "--shape", "qwen3-0.6b"), show_mfu),
    "recipes": Part(900, recipes, show_recipes),
    "weight_sync": Part(420, weight_sync, show_any),
    "kill_engine": Part(560, kill_engine, show_any),
}

RELEASE = ("mfu", "mfu_0.6b", "step", "recipes")
RELEASE_GPUS = ("mfu_gpus", "mfu_megatron_gpus")
RELEASE_SECONDS = 1800.0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", help=f"comma-separated: {', '.join(PARTS)}")
    parser.add_argument(
        "--release", action="store_true", help="what the pages show; by --gpus without --parts"
    )
    parser.add_argument("--commit", help="of the code, where git cannot say it")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the table's figures and logs"
    )
    parser.add_argument(
        "--work", type=Path, help="folder for what the parts leave; default: a temporary one"
    )
    parser.add_argument(
        "--seconds", type=float, help="for all parts together; default: 580, 1800 for a release"
    )
    parser.add_argument("--gpus", type=int, default=4, help="of the parts with several")
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        metavar="N",
        help="GPUs that the parts share, each on its own; default: all parts one after the other",
    )
    parser.add_argument(
        "--smollm2", type=Path, help="folder of SmolLM2-135M-Instruct, for `curve` and `recipes`"
    )
    parser.add_argument("--gsm8k", type=Path, help="rows of GSM8K, for `step`")
    parser.add_argument("--device", default="cuda", help="cpu for a trial of the scripts")
    options = parser.parse_args()
    if options.parts:
        options.parts = options.parts.split(",")
    elif options.release:
        options.parts = [*RELEASE, *(RELEASE_GPUS if options.gpus > 1 else ())]
    else:
        parser.error("--parts or --release is needed")
    options.seconds = options.seconds or (RELEASE_SECONDS if options.release else 580.0)
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}; there are {', '.join(PARTS)}")
    for name in ("curve", "recipes"):
        if name in options.parts and options.smollm2 is None:
            parser.error(f"the part `{name}` needs --smollm2")
    for name in ("output", "smollm2", "gsm8k"):  # parts run in folders of their own
        path = getattr(options, name)
        setattr(options, name, path.resolve() if path else None)
    return options


def run_part(
    name: str, options: argparse.Namespace, folder: Path, seconds: float, gpu: str | None = None
) -> Figures:
    """Its figures, how it ended and how long it took; never raises for what the part does. It sees
    ``gpu`` only, or all if that is None."""
    part = PARTS[name]
    log = folder / "output.log"
    folder.mkdir(parents=True, exist_ok=True)
    limit = min(part.seconds, seconds)
    started = time.monotonic()
    mark = f"{os.getpid()}-{name}"
    env = {**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    env["PYTHONPATH"] = os.pathsep.join([env.get("PYTHONPATH", ""), str(CHECKOUT)]).strip(
        os.pathsep
    )
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpu
    if name.endswith("_gpus"):
        env.setdefault("OMP_NUM_THREADS", "8")  # torchrun's own default of 1 makes loading slow
    with open(log, "wb") as file:
        command = list(map(str, part.command(options, folder)))
        file.write((" ".join(command) + "\n").encode())
        file.flush()
        child = subprocess.Popen(
            command, cwd=folder, env=env, stdout=file, stderr=file, start_new_session=True
        )
        try:
            status = f"exit {child.wait(limit)}"
        except subprocess.TimeoutExpired:
            status = f"not done in {limit:.0f} s"
        end_all(child, mark, gpu)
    figures = last_json(log)
    return {"status": status, "seconds": round(time.monotonic() - started, 1), "figures": figures}


def end_all(child: subprocess.Popen[bytes], mark: str, gpu: str | None) -> None:
    """The part and whatever it left behind: first asked, then killed. They carry the part's
    mark.
    """
    import psutil

    left = [process for process in psutil.process_iter() if _carries(process, mark)]
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.send_signal(sign)
        _, left = psutil.wait_procs(left, timeout=15)
        left = [process for process in psutil.process_iter() if _carries(process, mark)]
    child.wait()
    wait_for_memory(gpu)


def _carries(process: Any, mark: str) -> bool:
    import psutil

    try:
        return process.environ().get(MARK) == mark
    except psutil.Error:
        return False


def wait_for_memory(gpu: str | None) -> None:
    """The next part on this GPU (None: on all of them) measures memory: wait until the last one's
    is back.
    """
    if shutil.which("nvidia-smi") is None:
        return
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if gpus := gpu or os.environ.get("CUDA_VISIBLE_DEVICES"):
        query += ["-i", gpus]
    until = time.monotonic() + MEMORY_SECONDS
    while time.monotonic() < until:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.split()
        if all(int(word) < 1500 for word in said if word.isdigit()):
            return
        time.sleep(1.0)


def commit() -> str:
    """The short hash of the code, with ``+`` if it is changed; ``unknown`` outside of git."""
    git = ["git", "-C", str(CHECKOUT)]
    try:
        found = subprocess.run(
            [*git, "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def card() -> str:
    """The name of the machine's first GPU; ``cpu`` without one."""
    query = ["nvidia-smi", "-i", "0", "--query-gpu=name", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return "cpu"
    return subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()


def last_json(log: Path) -> Figures | None:
    for line in reversed(log.read_text(encoding="utf-8", errors="replace").splitlines()):
        if line.startswith("{"):
            try:
                found: Figures = json.loads(line)
            except json.JSONDecodeError:
                continue
            return found
    return None


def keep(options: argparse.Namespace, work: Path, results: dict[str, Figures]) -> None:
    """Few files, for whoever carries them: figures, the end of each log, curves."""
    options.output.mkdir(parents=True, exist_ok=True)
    what = f"release_{date.today()}" if options.release else "_".join(options.parts)
    stem = f"h200_{what}"[:80]
    table = {"commit": options.commit or commit(), "date": str(date.today()), "card": card()}
    table |= {"gpus_at_once": options.at_once, "parts": results}
    (options.output / f"{stem}.json").write_text(json.dumps(table, indent=1) + "\n")
    with open(options.output / f"{stem}.log", "w", encoding="utf-8") as file:
        for name in results:
            for log in [
                work / name / "output.log",
                *sorted((work / name).glob("**/engine*.log"))[:2],
            ]:
                if log.is_file():
                    text = log.read_text(encoding="utf-8", errors="replace")[-LOG_BYTES:]
                    file.write(f"===== {name}: {log.relative_to(work)}\n{text}\n")
            for pattern in KEPT:
                for path in (work / name).glob(pattern):
                    shutil.copy2(path, options.output / path.name)


def main() -> None:
    options = parse_options()
    work = options.work or Path(tempfile.mkdtemp(prefix="h200-"))
    started = time.monotonic()
    results: dict[str, Figures] = {}
    kept = threading.Lock()

    slots = Slots(machine_gpus(options.at_once), 1)

    def measure(name: str) -> None:
        wanted = options.gpus if name.endswith("_gpus") else 1
        with slots.take(min(wanted, options.at_once)) as gpus:
            left = options.seconds - (time.monotonic() - started)
            if left < 30:
                outcome: Figures = {"status": "no time left", "seconds": 0.0, "figures": None}
            else:
                print(f"--- {name}", flush=True)
                whole_machine = options.at_once == 1 or len(gpus) < wanted
                visible = None if whole_machine else ",".join(gpus)
                outcome = run_part(name, options, work / name, left, visible)
        with kept:
            results[name] = outcome
            keep(options, work, results)
        log = work / name / "output.log"
        if outcome["status"] != "exit 0" and log.is_file():
            tail = log.read_text(encoding="utf-8", errors="replace")
            print("\n".join(tail.splitlines()[-25:]), flush=True)

    with ThreadPoolExecutor(len(options.parts)) as pool:
        list(pool.map(measure, options.parts))
    results = {name: results[name] for name in options.parts}
    print("=" * 100)
    print(f"commit {options.commit or commit()}, {card()}")
    for name, outcome in results.items():
        print(
            f"{name:20} {outcome['status']:>20} {outcome['seconds']:6.0f} s  {shown(name, outcome)}"
        )
    keep(options, work, results)
    short = {name: {**o, "figures": _short(o["figures"])} for name, o in results.items()}
    print(json.dumps(short), flush=True)


def _short(figures: Figures | None) -> Figures | None:
    """Without what is long: it is in the file."""
    return figures and {
        name: value for name, value in figures.items() if len(json.dumps(value)) < 700
    }


if __name__ == "__main__":
    main()
