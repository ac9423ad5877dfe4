"""What kind of run this is, where it writes, and what scales it to a machine."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.estimator import estimator_label
from slime.config.flag import DERIVED, flag
from slime.config.machine import Machine, installed

if TYPE_CHECKING:
    from slime.config.args import Args


@dataclass
class RunConfig:
    _title = "run"

    train_backend: str = flag(
        DERIVED,
        help="what trains; default: megatron on CUDA where installed, else fsdp (Hugging Face models)",
        choices=("fsdp", "megatron"),
    )
    rollout_backend: str = flag(
        DERIVED,
        help="what generates; default: sglang on CUDA where installed, else embedded (our own server)",
        choices=("embedded", "sglang"),
    )
    deterministic: bool = flag(
        DERIVED,
        kind="toggle",
        help="same seed, same run: fixed compute shapes, groups judged in submission order. Bit for bit with FSDP and "
        "the embedded engine on the CPU, where it is the default (not with --partial-rollout); best effort with SGLang "
        "and on GPUs",
    )
    seed: int = flag(1234, help="seed of initialisation, dropout and everything the trainer draws")
    output_dir: str = flag("outputs", help="each run writes a folder of its own below this one")
    run_name: str = flag(
        DERIVED,
        help="name of the run's folder; default: model, estimator and time, or the resumed run's",
    )
    override: str | None = flag(
        None,
        kind="path",
        help="YAML file of flag names and values, applied last and printed: scales a recipe to a machine",
    )
    custom_config_path: str | None = flag(
        None,
        kind="path",
        help="YAML file; every key becomes an attribute of args (before the checks), for the user's own hooks",
    )
    start_timeout: float = flag(900.0, above=0, help="seconds that an engine or the trainer may take to start")
    status_timeout: float = flag(
        120.0,
        low=0,
        help="seconds without an answer after which the rollout manager or a training rank counts as lost, long before "
        "--phase-timeout; 0: never",
    )
    phase_timeout: float = flag(3600.0, above=0, help="seconds that generate, train or a weight sync may take")


def derive_backends(args: Args, machine: Machine) -> None:
    if args.train_backend is None:
        megatron = machine.cuda and installed("megatron.core")
        args.train_backend = "megatron" if megatron else "fsdp"
    if args.rollout_backend is None:
        sglang = machine.cuda and installed("sglang")
        args.rollout_backend = "sglang" if sglang else "embedded"
    if args.embedded_device is None:
        args.embedded_device = "cuda" if machine.cuda else "cpu"


def derive_run_folder(args: Args, now: Callable[[], str] = lambda: time.strftime("%Y%m%d-%H%M%S")) -> None:
    if args.run_name is None:
        resumed = _resumed_run(args)
        model = re.sub(r"[^\w.-]+", "-", Path(args.hf_checkpoint).name) if args.hf_checkpoint else "run"
        kind = estimator_label(args.advantage_estimator) if args.loss_type == "policy_loss" else args.loss_type
        args.run_name = resumed or f"{model}-{kind}-{now()}"
    if args.save_interval and args.save is None:
        args.save = str(Path(args.output_dir) / args.run_name / "checkpoints")
        args.notices.append(f"--save is not given: snapshots go to {args.save}")


def _resumed_run(args: Args) -> str | None:
    """Name of the run whose ``outputs/<run>/checkpoints`` is loaded, so that it goes on in its own folder."""
    if args.load is None or args.finetune:
        return None
    load, outputs = Path(args.load).resolve(), Path(args.output_dir).resolve()
    inside = load.name == "checkpoints" and load.parent.parent == outputs and load.is_dir()
    return load.parent.name if inside else None
