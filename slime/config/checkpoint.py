"""Where weights come from and where a run is kept."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flag import flag


@dataclass
class CheckpointConfig:
    _title = "checkpoints"

    load: str = flag(None, help="resume from here (a --save folder), or start from this Hugging Face folder")
    save: str = flag(None, help="folder of snapshots; default with --save-interval: outputs/<run>/checkpoints")
    save_interval: int = flag(None, low=1, help="snapshot every N rollouts, and at the end")
    save_keep_last: int = flag(
        None,
        low=1,
        help="delete all but the last N snapshots; default: keep all, with --save-retain-interval 1",
    )
    save_retain_interval: int = flag(
        None, low=1, help="of the snapshots that would be deleted, keep one every N rollouts"
    )
    save_hf: str = flag(None, help="also export Hugging Face weights; {rollout_id} in the path")
    ref_load: str = flag(None, help="reference model; default --hf-checkpoint")
    ref_ckpt_step: int = flag(
        None,
        low=0,
        help="iteration of the reference checkpoint",
        status="refused",
        reason="--ref-load is a Hugging Face folder, which has no iterations",
    )
    ckpt_step: int = flag(None, low=0, help="iteration to load instead of the latest")
    no_save_optim: bool = flag(False, help="leave the optimizer out of snapshots")
    no_load_optim: bool = flag(
        False,
        help="leave the snapshot's optimizer and schedule aside and begin them anew",
    )
    no_load_rng: bool = flag(False, help="leave the snapshot's random state aside")
    finetune: bool = flag(False, help="take only the weights of --load, and start at rollout 0")
    async_save: bool = flag(
        False,
        help="write snapshots while the run goes on; it holds a copy of the training state in CPU memory meanwhile",
    )
    ckpt_format: str = flag(
        "torch_dist",
        choices=("torch", "torch_dist"),
        help="Megatron's snapshots: torch_dist can be read by another layout, torch (a file per rank) by its own alone",
    )
