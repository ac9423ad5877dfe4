"""Minutes from ``pip install`` to the first rising reward curve: slime and TRL, each in a fresh
environment.

Both install with pip from the configured indexes (torch's CPU build first, as ``trl_step.py``
does), then train the same model on the same rows with the same settings (those of ``trl_step.py``).
The curve counts as rising at the first step whose mean reward is at least ``--rise`` above that of
the first step. The model and the rows are there already. slime is installed as a wheel of this
checkout, which is built before the clock starts. The last line of the output is JSON with all
figures.

    python benchmarks/first_curve.py --only trl --output-dir outputs/first_curve
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trl_step


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="Hugging Face folder; default: models/SmolLM2-135M-Instruct"
    )
    parser.add_argument("--steps", type=int, default=8, help="steps of the run (default: 8)")
    parser.add_argument(
        "--rise",
        type=float,
        default=0.15,
        help="by how much the reward has to rise (default: 0.15)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("trl", "slime"), help="measure one of the two")
    parser.add_argument(
        "--timeout", type=float, default=1800, help="seconds that one run may take (default: 1800)"
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=trl_step.CHECKOUT / "outputs" / "benchmarks" / "first_curve",
    )
    args = parser.parse_args()
    args.model = (
        (args.model or trl_step.CHECKOUT / "models" / "SmolLM2-135M-Instruct")
        .expanduser()
        .resolve()
    )
    args.output_dir = args.output_dir.expanduser().resolve()
    return args


def main() -> int:
    args = parse_args()
    from slime.plugins.tools.commands.make_data import make_products

    data, _ = make_products(args.output_dir / "data", seed=args.seed)
    figures: dict[str, Any] = {
        "benchmark": "first_curve", "model": args.model.name, "steps": args.steps, "rise": args.rise,
        "cores": len(os.sched_getaffinity(0)),
    }  # fmt: skip
    for name in [args.only] if args.only else ["slime", "trl"]:
        figures[name] = measure(args, name, data)
        print(f"{name}: {figures[name]}", flush=True)
    print(json.dumps(figures))
    return 0


def measure(args: argparse.Namespace, name: str, data: Path) -> dict[str, Any]:
    """Install into a fresh environment and train; all times are seconds since the first ``pip
    install``.
    """
    folder = args.output_dir / f"venv-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    package = build_wheel(args.output_dir / "wheel") if name == "slime" else trl_step.TRL
    # With the checkout on PYTHONPATH, pip would take the metadata that building the wheel has left
    # there for an installed slime, and install nothing.
    os.environ.pop("PYTHONPATH", None)
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    for packages in ([trl_step.TORCH], [trl_step.TORCH, package]):
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
    installed = time.monotonic() - began
    settings = step_settings(args, data)
    if name == "trl":
        found = trl_step.run_trl(settings, python)
        rewards, seconds = found["rewards"], found["seconds"]
    else:
        rewards, seconds = run_slime(settings, python)
    ended = time.monotonic() - began
    return curve_figures(args.rise, rewards, seconds, installed, ended)


def build_wheel(folder: Path) -> str:
    """Build the wheel of this checkout; returns its path."""
    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "-w",
        str(folder),
        str(trl_step.CHECKOUT),
    ]
    subprocess.run(words, check=True)
    return str(max(folder.glob("slime_rl-*.whl"), key=lambda path: path.stat().st_mtime))


def step_settings(args: argparse.Namespace, data: Path) -> Any:
    """The arguments of ``trl_step.py`` for this run, without warm-up steps."""
    return SimpleNamespace(
        model=args.model, dtype="float32", prompts=8, group_size=8, new_tokens=20, steps=args.steps, warmup=0,
        threads=2, trl_micro_batch=16, seed=args.seed, data=data, output_dir=args.output_dir, timeout=args.timeout,
        our_flags="",
    )  # fmt: skip


def run_slime(settings: Any, python: Path) -> tuple[list[float], list[float]]:
    """``slime train`` of the environment, away from the checkout: the rewards and the seconds of
    each step.
    """
    _, _, *flags = trl_step.our_command(settings, "first-curve")
    words = [str(python.with_name("slime")), "train", *flags]
    print("slime:", shlex.join(words), flush=True)
    subprocess.run(words, cwd=settings.output_dir, check=True, timeout=settings.timeout)
    lines = (
        (settings.output_dir / "first-curve" / "metrics.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    found = trl_step.our_figures([json.loads(line) for line in lines], warmup=0)
    return found["rewards"], found["seconds"]


def curve_figures(
    rise: float, rewards: list[float], seconds: list[float], installed: float, ended: float
) -> dict[str, Any]:
    """The times of the install, the first step and the first step whose reward has risen, since the
    beginning.

    Args:
        seconds: Of each step. The process ends with the last one, so the ends of the others follow
            from ``ended``.
    """
    ends = [
        ended - later for later in reversed([0.0, *itertools.accumulate(reversed(seconds[1:]))])
    ]
    risen = next((step for step, reward in enumerate(rewards) if reward >= rewards[0] + rise), None)
    return {
        "installed": round(installed, 1),
        "first_step": round(ends[0], 1),
        "risen_at_step": None if risen is None else risen + 1,
        "risen": None if risen is None else round(ends[risen], 1),
        "rewards": rewards,
        "seconds_per_step": seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
