"""A run: its backends, where it writes, its snapshots, and what scales it to a machine."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.algorithm import estimator_label
from slime.config.flag import DERIVED, flag
from slime.config.hf_config import looks_like_hub_id
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


@dataclass
class CheckpointConfig:
    _title = "checkpoints"

    load: str | None = flag(None, help="resume from here (a --save folder), or start from this Hugging Face folder")
    save: str | None = flag(None, help="folder of snapshots; default with --save-interval: outputs/<run>/checkpoints")
    save_interval: int | None = flag(None, low=1, help="snapshot every N rollouts, and at the end")
    save_keep_last: int | None = flag(
        None,
        low=1,
        help="delete all but the last N snapshots; default: keep all, with --save-retain-interval 1",
    )
    save_retain_interval: int | None = flag(
        None, low=1, help="of the snapshots that would be deleted, keep one every N rollouts"
    )
    save_hf: str | None = flag(None, help="also export Hugging Face weights; {rollout_id} in the path")
    ref_load: str = flag(DERIVED, help="reference model; default --hf-checkpoint")
    ckpt_step: int | None = flag(None, low=0, help="iteration to load instead of the latest")
    no_save_optim: bool = flag(False, help="leave the optimizer out of snapshots")
    no_load_optim: bool = flag(
        False,
        help="leave the snapshot's optimizer and schedule aside and begin them anew",
    )
    no_load_rng: bool = flag(False, help="leave the snapshot's random state aside")
    finetune: bool = flag(False, help="take only the weights of --load, and start at rollout 0")
    async_save: bool = flag(
        False,
        help="write snapshots while the run goes on; from the first one on, each rank keeps CPU memory "
        "(pinned for state on a GPU) for a copy of its training state",
    )
    ckpt_format: str = flag(
        "torch_dist",
        choices=("torch", "torch_dist"),
        help="Megatron's snapshots: torch_dist can be read by another layout, torch (a file per rank) by its own alone",
    )


def derive_checkpoints(args: Args) -> None:
    if args.finetune:
        args.no_load_optim = args.no_load_rng = True
    if args.save_retain_interval and args.save_keep_last is None:
        args.save_keep_last = 1


def check_load(args: Args) -> list[str]:
    if args.load is None or args.load == args.save or Path(args.load).expanduser().exists():
        return []
    if looks_like_hub_id(args.load):
        return []
    return [f"--load {args.load}: no such folder (a first run may name the folder of --save)"]
