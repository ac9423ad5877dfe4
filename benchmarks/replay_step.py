"""``slime replay`` and ``slime verify`` on GPUs: a run that records, its steps again, and models
against the CPU.

    python benchmarks/replay_step.py --output /tmp/replay                  # one GPU, the shape of Qwen3-0.6B
    python benchmarks/replay_step.py --output /tmp/replay --gpus 2         # also on two data-parallel ranks
    python benchmarks/replay_step.py --output /tmp/replay --device cpu --tiny

Two runs of three steps, one with --deterministic; of each, the last step is replayed twice. Then
cut-down models are verified on FSDP and, with --verify, on others: ``--verify "openai/gpt-oss-20b
--backend megatron"``. A part that fails costs its own figures only. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "benchmarks")]

from random_model import SHAPES, write_model  # noqa: E402

from slime.plugins.tools.commands.make_data import make_products  # noqa: E402

STEPS = 3


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-0.6b", help="of benchmarks/random_model.py")
    parser.add_argument(
        "--gpus", type=int, default=1, help="GPUs of the machine; the run itself uses one"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu for a trial of the script"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny shape and batch, for a trial")
    parser.add_argument(
        "--verify", action="append", default=[], metavar="WORDS", help="words of slime verify"
    )
    parser.add_argument("--seconds", type=float, default=180.0, help="the deadline of each part")
    parser.add_argument("--output", type=Path, default=Path("/tmp/replay_step"))
    options = parser.parse_args()
    if options.tiny:
        options.shape = "tiny"
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    return options


def command(options: argparse.Namespace, *words: object) -> tuple[int, str, float]:
    """Run a command of slime; returns its exit code, what it printed, and its seconds."""
    path = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "slime.cli.main", *map(str, words)],
            cwd=options.output, env={**os.environ, "PYTHONPATH": path}, text=True, timeout=options.seconds,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        return 124, said.decode() if isinstance(said, bytes) else said, options.seconds
    return done.returncode, done.stdout, time.monotonic() - started


def train(options: argparse.Namespace, model: Path, data: Path, name: str, *flags: str) -> Path:
    """A run of FSDP and the embedded engine on one GPU, which records what a replay needs."""
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    count = 4 if options.tiny else 8
    code, said, seconds = command(
        options, "train", "--hf-checkpoint", model, "--prompt-data", data, "--rm-type", "random",
        "--num-rollout", STEPS,
        "--rollout-batch-size", count, "--n-samples-per-prompt", count, "--rollout-max-response-len", 8 * count,
        "--num-steps-per-rollout", 2, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 2048, "--lr", 1e-5,
        "--train-backend", "fsdp", "--rollout-backend", "embedded", "--train-dtype", dtype, "--apply-chat-template",
        "--colocate", "--no-offload-train", "--no-offload-rollout", "--actor-num-gpus-per-node", 1,
        "--save", f"saved-{name}", "--save-interval", 1, "--save-keep-last", 2, "--dump-details", f"details-{name}",
        "--output-dir", options.output, "--run-name", name, "--phase-timeout", options.seconds, *flags,
    )  # fmt: skip
    print(
        f"{name}: exit code {code} after {seconds:.0f} s"
        + ("" if code == 0 else "\n" + said[-3000:]),
        flush=True,
    )
    return options.output / name


def replay(options: argparse.Namespace, run: Path, *words: object) -> dict[str, Any]:
    """The last step again: whether the numbers are equal, and by how much the weights differ."""
    code, said, seconds = command(options, "replay", run, "--step", STEPS - 1, "--json", *words)
    begin = said.find("\n{\n") + 1 if not said.startswith("{") else 0
    try:
        found = json.loads(said[begin:])
    except ValueError:
        return {"words": [*map(str, words)], "code": code, "error": said[-1500:]}
    largest = found["metrics"]["largest"]
    return {
        "words": [*map(str, words)], "code": code, "seconds": round(seconds, 1), "device": found["device"],
        "exact": found["exact"], "tolerance": found["tolerance"], "metrics": len(found["metrics"]["names"]),
        "largest": largest, "tensors": found["tensors"], "first_that_differs": found["differs"],
        "worst_of_the_steps_change": found["worst"],
        "not_equal": [one["name"] for one in found["metrics"]["differences"]],
    }  # fmt: skip


def verify(options: argparse.Namespace, words: str) -> dict[str, Any]:
    code, said, seconds = command(options, "verify", *words.split())
    print(said[-1200:], flush=True)
    return {
        "words": words,
        "code": code,
        "seconds": round(seconds, 1),
        "said": said.splitlines()[-12:],
    }


def main() -> None:
    options = parse_options()
    model = options.output / options.shape
    if not model.is_dir():
        write_model(options.shape, model)
    data, _ = make_products(options.output / "data", seed=1)
    result: dict[str, Any] = {
        "shape": options.shape,
        "device": options.device,
        "replays": [],
        "verified": [],
    }
    for name, flags in (("plain", ()), ("deterministic", ("--deterministic",))):
        run = train(options, model, data, name, *flags)
        for words in [
            [],
            [],
            *([["--actor-num-gpus-per-node", 2]] if options.gpus > 1 or options.tiny else []),
        ]:
            one = {"run": name, **replay(options, run, *words)}
            print(json.dumps(one), flush=True)
            result["replays"].append(one)
        # 7 GiB for each snapshot
        shutil.rmtree(options.output / f"saved-{name}", ignore_errors=True)
    (options.output / "config.json").write_text(
        json.dumps({"model_type": "qwen3"} | SHAPES["qwen3-4b"])
    )
    for words in [f"{options.output} --engine embedded", *options.verify]:
        result["verified"].append(verify(options, words))
    (options.output / "replay_step.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
