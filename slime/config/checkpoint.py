"""Where weights come from and where a run is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.flag import DERIVED, flag
from slime.config.hf_config import looks_like_hub_id

if TYPE_CHECKING:
    from slime.config.args import Args


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
