"""``slime doctor`` on whole runs made here: healthy ones of many kinds, and faults that really
happen to a run.

    python benchmarks/doctor_runs.py --model SMOLLM2_FOLDER --output /tmp/doctor             # all
    python benchmarks/doctor_runs.py --model SMOLLM2_FOLDER --output /tmp/doctor --only lora ppo
    python benchmarks/doctor_runs.py --model SMOLLM2_FOLDER --output /tmp/doctor --again             # without runs

Each run is a command of train.py on the CPU. A healthy one must have no finding but hints; of a
faulty one, the first finding must be the expected one. Prints a line for each, writes
``doctor_runs.json``, and keeps the metrics of healthy runs as ``NAME_cpu.jsonl``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "benchmarks")]

from run_processes import MARK, ROLES, alive, command_line  # noqa: E402

from slime.plugins.tools.commands.make_data import make_products  # noqa: E402
from slime.plugins.tools.doctor import diagnose  # noqa: E402
from slime.plugins.tools.doctor.evidence import stacks  # noqa: E402
from slime.plugins.tools.doctor.facts import Finding, read_facts  # noqa: E402

REFUSED = "refused"
"""train.py finds the fault before it makes the folder of a run, and says what it is."""
STEPS = 4
SECONDS = 400.0
CODE = {
    "broken.py": "async def reward(args, sample, **kwargs):\n"
    "    return sample.metadata['answer']\n",
    "missing.py": (
        "async def reward(args, sample, **kwargs):\n    import a_missing_package\n    return 1.0\n"
    ),
    "zero.py": "async def reward(args, sample, **kwargs):\n    return 0.0\n",
    "endless.py": "import asyncio\n"
    "async def generate(args, sample, sampling_params):\n"
    "    await asyncio.sleep(3600)\n",
    "prompt.py": "async def reward(args, sample, **kwargs):\n"
    "    return float(len(str(sample.label)) - 1)\n",
    "nothing.py": "def keep(args, samples, **kwargs):\n    return False\n",
}
EVALUATION = (
    "--eval-prompt-data", "products", "data/products_eval.jsonl@[0:8]", "--eval-interval", 1,
    "--n-samples-per-eval-prompt", 2,
)  # fmt: skip
PPO = ("--advantage-estimator", "ppo", "--critic-lr", "1e-5")
SFT = (
    "--input-key", "messages", "--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout",
    "--loss-type", "sft_loss", "--disable-compute-advantages-and-returns",
)  # fmt: skip
ON_CPU = json.dumps(
    {
        "PYTHONPATH": os.pathsep.join(
            [str(CHECKOUT / "tests/plugins/megatron/cpu_site"), str(CHECKOUT)]
        )
    }
)
MEGATRON = ("--train-backend", "megatron", "--train-env-vars", ON_CPU)


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        words: What is special about it.
        flags: Flags of train.py beside :func:`common`.
        expected: The kind of the first finding; empty for a healthy run; :data:`REFUSED` if no run
            begins.
        strike: What is done to the run once its first step is trained.
        again: Flags of a second start, which resumes it.
        script: ``train.py`` or ``train_async.py``.
    """

    words: str
    flags: tuple[object, ...] = ()
    expected: str = ""
    strike: Callable[[str], None] | None = None
    again: tuple[object, ...] = ()
    script: str = "train.py"
    files: int | None = None


def send(number: int, role: str) -> Callable[[str], None]:
    """A signal for the first process of the run that has this role."""

    def strike(mark: str) -> None:
        for process in alive(mark):
            if ROLES[role](command_line(process)):
                return process.send_signal(number)
        raise RuntimeError(f"the run has no {role}")

    return strike


HEALTHY = {
    "lora": Case("LoRA", ("--lora-rank", 8, "--lr", "1e-4")),
    "ppo": Case("PPO with a critic", PPO),
    "sft": Case("supervised fine-tuning", SFT),
    "two_engines": Case("two engines", ("--rollout-num-gpus", 2)),
    "two_ranks": Case("two data-parallel ranks", ("--actor-num-gpus-per-node", 2)),
    "resumed": Case(
        "ended after two steps and resumed", ("--num-rollout", 2, "--save", "saved", "--save-interval", 1),
        again=("--save", "saved", "--load", "saved"),
    ),
    "evaluated": Case(
        "an evaluation after each step, two optimizer steps, GSPO",
        (*EVALUATION, "--num-steps-per-rollout", 2, "--advantage-estimator", "gspo"),
    ),
    "one_step_async": Case("one-step asynchronous, with TIS", ("--use-tis",), script="train_async.py"),
    "megatron": Case("Megatron with two pipeline stages", (
        *MEGATRON, "--actor-num-gpus-per-node", 2, "--pipeline-model-parallel-size", 2,
    )),
}  # fmt: skip
FAULTS = {
    "broken_reward": Case("the reward raises KeyError", ("--custom-rm-path", "broken.py:reward"), "own_function"),
    "missing_package": Case(
        "the reward imports a missing package", ("--custom-rm-path", "missing.py:reward"), "own_function"
    ),
    "zero_reward": Case("the reward is always 0", ("--custom-rm-path", "zero.py:reward"), "no_reward"),
    "no_learning_rate": Case("the learning rate is 0", ("--lr", 0), "no_learning_rate"),
    "greedy": Case("a temperature of 0", ("--rollout-temperature", 0), REFUSED),
    "prompt_reward": Case(
        "the reward looks at the label alone", ("--custom-rm-path", "prompt.py:reward"), "no_spread"
    ),
    "cut_off": Case("responses of two tokens", ("--rollout-max-response-len", 2, "--num-rollout", 8), "truncated"),
    "large_step": Case("a learning rate of 0.1", ("--lr", 0.1), "large_learning_rate"),
    "filter": Case(
        "a filter that keeps no group",
        ("--dynamic-sampling-filter-path", "nothing.py:keep", "--phase-timeout", 60), "filter_starvation",
    ),
    "endless": Case(
        "generation does not end", ("--custom-generate-function-path", "endless.py:generate", "--phase-timeout", 30),
        "wait_expired",
    ),
    "driver_killed": Case("the driver gets SIGKILL", (), "driver_killed", send(signal.SIGKILL, "driver")),
    "engine_stopped": Case(
        "an engine gets SIGSTOP", ("--rollout-health-check-timeout", 600), "process_stopped",
        send(signal.SIGSTOP, "engine"),
    ),
    "engine_killed": Case(
        "the only engine gets SIGKILL", (), "process_lost", send(signal.SIGKILL, "engine")
    ),
    "rank_killed": Case("the training rank gets SIGKILL", (), "process_lost", send(signal.SIGKILL, "rank")),
    "damaged_model": Case("model.safetensors is cut off", ("--hf-checkpoint", "damaged"), REFUSED),
    "open_files": Case("at most 40 open files", (), "open_files", files=40),
}  # fmt: skip


def common(options: argparse.Namespace, folder: Path) -> list[object]:
    """4 prompts x 4 samples of at most 20 tokens, as the quickstart has them."""
    train, _ = make_products(folder / "data", seed=1)
    return [
        "--hf-checkpoint", options.model, "--prompt-data", train, "--rm-type", "last_number", "--rollout-batch-size", 4,
        "--n-samples-per-prompt", 4, "--rollout-max-response-len", 20, "--num-rollout", STEPS, "--lr", "1e-5",
        "--train-dtype", "float32", "--train-backend", "fsdp", "--rollout-backend", "embedded",
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", 2048, "--apply-chat-template", "--rollout-shuffle",
        "--output-dir", folder, "--run-name", "run",
    ]  # fmt: skip


def prepare(options: argparse.Namespace, name: str) -> Path:
    folder: Path = options.output / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file, code in CODE.items():
        (folder / file).write_text(code)
    if name == "damaged_model":
        shutil.copytree(options.model, folder / "damaged", symlinks=False)
        os.truncate(folder / "damaged" / "model.safetensors", 50_000_000)
    if name == "sft":
        train, _ = make_products(folder / "data", seed=1)
        rows = [json.loads(line) for line in train.read_text().splitlines()]
        turns = [
            {"messages": [{"role": "user", "content": _text(row["prompt"])},
                          {"role": "assistant", "content": f"The answer is {row['label']}."}]}
            for row in rows
        ]  # fmt: skip
        (folder / "transcripts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in turns))
    return folder


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def started(name: str, case: Case, folder: Path, flags: list[object]) -> subprocess.Popen[bytes]:
    mark = f"doctor-{name}-{os.getpid()}"
    environment = {**os.environ, MARK: mark, "PYTHONPATH": str(CHECKOUT)}

    def limits() -> None:
        if case.files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (case.files, case.files))

    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, str(CHECKOUT / case.script), *map(str, flags)],
            cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True, preexec_fn=limits,
        )  # fmt: skip


def steps_of(folder: Path) -> int:
    file = folder / "run" / "metrics.jsonl"
    return file.read_text().count('"rollout/step"') if file.is_file() else 0


def run(options: argparse.Namespace, name: str, case: Case) -> dict[str, Any]:
    """Make a run, and return what the doctor finds in its folder."""
    folder = prepare(options, name)
    mark = f"doctor-{name}-{os.getpid()}"
    base = common(options, folder)
    if name == "sft":
        base[base.index("--prompt-data") + 1] = folder / "transcripts.jsonl"
        base.remove("--apply-chat-template")
    try:
        for flags in [case.flags, *([case.again] if case.again else [])]:
            process = started(name, case, folder, [*base, *flags])
            wait(process, folder, case, mark)
        return result(options, name, case)
    finally:
        for left in alive(mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


def result(options: argparse.Namespace, name: str, case: Case) -> dict[str, Any]:
    """Return what the doctor finds in the folder of a run, and keep the metrics of a healthy
    one.
    """
    folder = options.output / name
    found = findings(folder, case)
    problems = {one.kind: one.title for one in found if not one.hint}
    first = next(iter(problems), "")
    if not case.expected and not problems:
        shutil.copy(folder / "run" / "metrics.jsonl", options.output / f"{name}_cpu.jsonl")
    return {
        "date": time.strftime("%Y-%m-%d"), "what": case.words, "steps": steps_of(folder), "expected": case.expected,
        "first": first, "right": first == case.expected, "findings": problems,
        "hints": [one.kind for one in found if one.hint],
    }  # fmt: skip


def findings(folder: Path, case: Case) -> list[Finding]:
    """Return what the doctor finds; for a run that never began, the problem that train.py named."""
    run_folder, said = folder / "run", (folder / "output.txt").read_text()
    if not run_folder.exists() and "1 problem with the arguments" in said:
        return [Finding(REFUSED, said.strip().splitlines()[-1], (), "")]
    return diagnose(read_facts(run_folder, stacks if case.strike is not None else None))


def wait(process: subprocess.Popen[bytes], folder: Path, case: Case, mark: str) -> None:
    """Wait until the run ends; or, if something is done to it, until that has had its effect."""
    end = time.monotonic() + SECONDS
    struck = case.strike is None
    while process.poll() is None and time.monotonic() < end:
        if not struck and steps_of(folder) >= 1:
            assert case.strike is not None
            case.strike(mark)
            struck = True
            if case.expected == "process_stopped":
                time.sleep(5)
                return
        time.sleep(0.5)
    if process.poll() is None:
        raise RuntimeError(f"the run did not end within {SECONDS:.0f} s")
    if not struck:
        raise RuntimeError(
            f"the run ended before its first step: {(folder / 'output.txt').read_text()[-2000:]}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="a folder of SmolLM2-135M-Instruct"
    )
    parser.add_argument("--output", type=Path, default=Path("/tmp/doctor_runs"))
    parser.add_argument(
        "--only", nargs="+", choices=[*HEALTHY, *FAULTS], default=[*HEALTHY, *FAULTS]
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="read the folders of earlier runs again, without running",
    )
    options = parser.parse_args()
    options.output, options.model = options.output.resolve(), options.model.resolve()
    file = options.output / "doctor_runs.json"
    known: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    for name in options.only:
        begin = time.monotonic()
        try:
            known[name] = (result if options.again else run)(
                options, name, (HEALTHY | FAULTS)[name]
            )
        except (OSError, RuntimeError, ValueError) as error:
            print(f"{name}: {error}", flush=True)
            continue
        one = known[name]
        verdict = "right" if one["right"] else "WRONG"
        print(
            f"{name}: {one['first'] or 'nothing'} ({verdict}), {time.monotonic() - begin:.1f} s",
            flush=True,
        )
        options.output.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(known, indent=1) + "\n")
    return int(not all(known.get(name, {}).get("right") for name in options.only))


if __name__ == "__main__":
    sys.exit(main())
