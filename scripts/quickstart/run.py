"""The quickstart, once the environment exists: model, data, ``train.py``, and the result."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from slime.cli.command import CommandError
from slime.config.hf_config import read_chat_template
from slime.plugins.tools.commands.fetch_model import SOURCES, fetch_model
from slime.plugins.tools.commands.make_data import make_products

CHECKOUT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m-instruct"
BASE_LR = "1e-6"
RUN = "quickstart"
GRACE_SECONDS = 60.0  # for train.py to shut down gracefully after Ctrl-C
SHOTS = ((11, 3), (4, 12), (12, 6), (2, 13))
"""Examples for a base model. None of them is a product of two digits, which the task asks for."""


def few_shot(rows: Path, model: Path) -> Path:
    """Write rows of chat prompts as texts for a base model: its first token, solved examples, and
    the question. Without its first token Gemma is lost: slime adds none to a text.
    """
    said = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))["bos_token"]
    start = said if isinstance(said, str) else (said or {}).get("content", "")
    start += "".join(f"Q: What is {a} times {b}?\nA: {a * b}\n\n" for a, b in SHOTS)
    texts = []
    for line in rows.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        question = row["prompt"][-1]["content"]
        texts.append(json.dumps(row | {"prompt": f"{start}Q: {question}\nA:"}) + "\n")
    path = rows.with_name(f"{rows.stem}_few_shot.jsonl")
    path.write_text("".join(texts), encoding="utf-8")
    return path


def base_flags(args: argparse.Namespace, model: Path, train: Path, held_out: Path) -> list[str]:
    """The same for a base model: few-shot texts, and an answer ends with its line."""
    rows = [few_shot(path, model) for path in (train, held_out)]
    words = train_flags(args, model, *rows)
    words.remove("--apply-chat-template")
    words[words.index("--lr") + 1] = BASE_LR
    words[words.index("--rollout-max-response-len") + 1] = "8"
    return [*words, "--rollout-stop", "\n"]


def train_flags(args: argparse.Namespace, model: Path, train: Path, held_out: Path) -> list[str]:
    """GRPO on 8 prompts x 8 samples of 20 tokens; evaluation on held-out pairs before and after."""
    flags = {
        "hf-checkpoint": model,
        "prompt-data": train,
        "rm-type": "last_number",
        "rollout-batch-size": 8,
        "n-samples-per-prompt": 8,
        "rollout-max-response-len": 20,
        "num-rollout": args.num_rollout,
        "eval-interval": args.num_rollout,
        "n-samples-per-eval-prompt": 8,
        "eval-temperature": 1,
        "advantage-estimator": "grpo",
        "lr": 1e-5,
        "max-tokens-per-gpu": 2048,
        "train-dtype": "float32",
        "train-backend": "fsdp",
        "rollout-backend": "embedded",
        "seed": args.seed,
        "rollout-seed": args.seed,
        "output-dir": args.output_dir,
        "run-name": RUN,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [
        *words,
        "--eval-prompt-data",
        "products",
        str(held_out),
        "--apply-chat-template",
        "--rollout-shuffle",
        "--use-dynamic-batch-size",
        "--inline",
    ]


def main() -> int:
    args = parse_args()
    source = SOURCES.get(args.model)
    folder = CHECKOUT / "models" / source.name if source else None
    try:
        model = fetch_model(args.model, folder, accept_terms=args.accept_gemma_terms)
    except CommandError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    started = time.time()  # environment and model are set-up; what follows is the quickstart
    train, held_out = make_products(
        args.output_dir / "data" / f"products-seed{args.seed}", seed=args.seed
    )
    make_flags = base_flags if read_chat_template(str(model)) == "" else train_flags
    flags = make_flags(args, model, train, held_out)
    say(f"training {model.name} with GRPO for {args.num_rollout} steps, a few minutes on two cores")
    say(f"python train.py {shlex.join(flags)}")
    code = run_training(flags)
    if code != 0:
        say(f"train.py exited with status {code}; its logs are in {args.output_dir / RUN / 'logs'}")
        return code
    return report(args.output_dir / RUN / "summary.json", args.seed, time.time() - started)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="quickstart.sh", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of data, sampling and training (default: 1)"
    )
    parser.add_argument(
        "--model",
        default=MODEL,
        help="gemma3-270m (a base model under Gemma's terms), or a local Hugging Face folder, "
        "instead of SmolLM2-135M-Instruct",
    )
    parser.add_argument(
        "--accept-gemma-terms",
        action="store_true",
        help="as of slime fetch-model, for --model gemma3-270m",
    )
    parser.add_argument("--num-rollout", type=int, default=12, help="training steps (default: 12)")
    parser.add_argument(
        "--output-dir", type=Path, default=CHECKOUT / "outputs", help="the output folder (outputs)"
    )
    args = parser.parse_args()
    args.output_dir = args.output_dir.expanduser().resolve()
    if args.num_rollout < 1:
        parser.error(f"--num-rollout {args.num_rollout}: at least 1")
    return args


def run_training(flags: list[str]) -> int:
    """Run ``train.py`` and forward Ctrl-C and SIGTERM; a minute after the first of them it is
    killed.
    """
    asked: list[float] = []
    started: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(time.monotonic())
        if number != signal.SIGINT:  # the terminal sends Ctrl-C to both of us
            for process in started:
                process.send_signal(number)

    # Before train.py is started, because a signal that comes first would end this process alone.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    process = subprocess.Popen([sys.executable, str(CHECKOUT / "train.py"), *flags], cwd=CHECKOUT)
    started.append(process)
    if asked:
        process.terminate()
    while True:
        try:
            return process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            if asked and time.monotonic() - asked[0] > GRACE_SECONDS:
                say(f"train.py did not exit within {GRACE_SECONDS:.0f} s of the signal: killing it")
                process.kill()


def report(path: Path, seed: int, seconds: float) -> int:
    """Write the wall time of the whole quickstart to ``summary.json`` and print the result."""
    summary = json.loads(path.read_text(encoding="utf-8"))
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    phases = {
        name: value
        for name, value in summary["seconds_per_phase"].items()
        if name != "start_and_rest"
    }
    phases["start_and_rest"] = round(seconds - sum(phases.values()), 2)
    summary.update(seed=seed, seconds_total=round(seconds, 2), seconds_per_phase=phases)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
    say(f"held-out accuracy {before:.2f} → {after:.2f} in {seconds:.0f} s; figures in {path}")
    say(
        f"next: bash scripts/quickstart.sh --seed {seed + 1}, or your own data: "
        "docs/en/get_started/usage.md"
    )
    return 0


def say(text: str) -> None:
    print(f"quickstart: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
