"""Where weights come from and where a run is kept."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flag import flag

_READER = "slime/checkpoint"


@dataclass
class CheckpointConfig:
    _title = "checkpoints"

    load: str = flag(
        None, help="resume from here (a --save folder), or start from this Hugging Face folder", reader=_READER
    )
    save: str = flag(
        None, help="folder of snapshots; default with --save-interval: outputs/<run>/checkpoints", reader=_READER
    )
    save_interval: int = flag(None, help="snapshot every N rollouts, and at the end", reader="train.py")
    save_retain_interval: int = flag(None, help="keep every snapshot whose number is a multiple of N", status="planned")
    save_hf: str = flag(None, help="also export Hugging Face weights; {rollout_id} in the path", reader="train.py")
    ref_load: str = flag(None, help="reference model; default --hf-checkpoint", reader="slime/backends")
    ref_ckpt_step: int = flag(None, help="iteration of the reference checkpoint", status="planned")
    ckpt_step: int = flag(None, help="iteration to load instead of the latest", reader="slime/cluster/run.py")
    no_save_optim: bool = flag(
        False, help="leave the optimizer out of snapshots", reader="slime/backends/fsdp/backend.py"
    )
    no_load_optim: bool = flag(False, help="leave the optimizer of the snapshot aside", status="planned")
    no_load_rng: bool = flag(False, help="leave the random state of the snapshot aside", status="planned")
    finetune: bool = flag(False, help="take the weights only, start at rollout 0", status="planned")
    async_save: bool = flag(False, help="write snapshots in the background", status="planned")
    ckpt_format: str = flag(
        "torch_dist", choices=("torch", "torch_dist"), help="format of Megatron checkpoints", status="planned"
    )
