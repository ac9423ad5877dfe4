"""Optimizer and learning-rate schedule; names and meanings are Megatron's, on both backends."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flag import DERIVED, flag


@dataclass
class OptimizerConfig:
    _title = "optimizer and schedule"

    optimizer: str = flag(
        "adam",
        choices=("adam", "sgd"),
        help="adam is AdamW",
        limits={"sgd": ("refused", "policies are trained with AdamW")},
    )
    lr: float = flag(1e-6, low=0, help="peak learning rate")
    min_lr: float = flag(0.0, low=0, help="where the decay ends")
    lr_decay_style: str = flag(
        "constant",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        help="shape of the decay",
    )
    lr_decay_iters: int | None = flag(None, low=1, help="optimizer steps of the decay; default: the whole run")
    lr_warmup_iters: int = flag(0, low=0, help="optimizer steps of linear warm-up")
    lr_warmup_fraction: float | None = flag(None, low=0, high=1, help="warm-up as a share of --lr-decay-iters")
    lr_warmup_init: float = flag(0.0, low=0, help="where the warm-up starts")
    lr_wsd_decay_iters: int | None = flag(None, low=0, help="optimizer steps of the last phase of WSD")
    lr_wsd_decay_style: str = flag(
        "exponential",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        help="shape of the last phase of WSD",
    )
    warmup_ratio: float | None = flag(None, low=0, high=1, help="old name of --lr-warmup-fraction")
    weight_decay: float = flag(0.0, low=0, help="decoupled weight decay")
    adam_beta1: float = flag(0.9, help="decay of the first moment")
    adam_beta2: float = flag(0.95, help="decay of the second moment")
    adam_eps: float = flag(1e-8, above=0, help="epsilon of Adam")
    clip_grad: float = flag(1.0, low=0, help="largest gradient norm; 0 turns clipping off")
    critic_lr: float = flag(DERIVED, low=0, help="learning rate of the critic; default --lr")
    critic_lr_warmup_iters: int = flag(DERIVED, low=0, help="warm-up of the critic; default --lr-warmup-iters")
    reset_optimizer_states: bool = flag(False, help="zero Adam's moments before each rollout's steps")
    use_stateless_adam: bool = flag(
        False, help="Adam without moments that persist: each step is lr x the gradient's sign, nearly"
    )
