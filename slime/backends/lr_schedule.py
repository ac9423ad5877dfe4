"""Megatron's learning-rate schedules, counted in optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LrSchedule:
    """Learning rate of optimizer step k (from 0): the formulas of Megatron's OptimizerParamScheduler,
    which counts samples; steps of equal size make that the same.

    Warm-up: ``init + (max − init)·k/warmup`` for k ≤ warmup. After it, with r = (k − warmup)/(decay − warmup):
    linear ``1 − r``, cosine ``(cos πr + 1)/2``, each from max to min; inverse-square-root ``max·√(warmup/k)``,
    at least min; WSD: max until ``decay − wsd_decay``, then down in one of four shapes. Behind ``decay``
    (but for constant): min.
    """

    max_lr: float
    min_lr: float = 0.0
    style: str = "constant"
    warmup_steps: int = 0
    warmup_init: float = 0.0
    decay_steps: int = 1
    wsd_decay_steps: int = 0
    wsd_style: str = "exponential"

    @classmethod
    def from_args(cls, args: Any, role: str = "actor") -> LrSchedule:
        """From the flags; a critic has ``--critic-lr`` and ``--critic-lr-warmup-iters`` where given."""
        critic = role == "critic"
        decay = args.lr_decay_iters or planned_steps(args)
        warmup = args.lr_warmup_iters or 0
        if args.lr_warmup_fraction:
            warmup = int(args.lr_warmup_fraction * decay)
        if critic and args.critic_lr_warmup_iters is not None:
            warmup = args.critic_lr_warmup_iters
        if args.lr_decay_style != "constant" and warmup >= decay:
            raise ValueError(
                f"warm-up of {warmup} steps leaves nothing of a decay of {decay} (--lr-decay-iters, or "
                "--num-rollout x samples / --global-batch-size): lower --lr-warmup-iters"
            )
        return cls(
            max_lr=args.critic_lr if critic and args.critic_lr is not None else args.lr,
            min_lr=args.min_lr,
            style=args.lr_decay_style,
            warmup_steps=warmup,
            warmup_init=args.lr_warmup_init,
            decay_steps=decay,
            wsd_decay_steps=args.lr_wsd_decay_iters or 0,
            wsd_style=args.lr_wsd_decay_style,
        )

    def lr(self, step: int) -> float:
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.warmup_init + (self.max_lr - self.warmup_init) * step / self.warmup_steps
        if self.style == "constant":
            return self.max_lr
        if step > self.decay_steps:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup_steps, 1) / max(step, 1)))
        return self.min_lr + self._coefficient(step) * (self.max_lr - self.min_lr)

    def _coefficient(self, step: int) -> float:
        ratio = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        if self.style == "linear":
            return 1.0 - ratio
        if self.style == "cosine":
            return 0.5 * (math.cos(math.pi * ratio) + 1.0)
        if self.style == "WSD":
            start = self.decay_steps - self.wsd_decay_steps
            return 1.0 if step <= start else _wsd(self.wsd_style, (step - start) / self.wsd_decay_steps)
        raise ValueError(f"unknown --lr-decay-style {self.style!r}")


def planned_steps(args: Any) -> int:
    """Optimizer steps of the whole run, as far as the flags tell; at least 1."""
    samples = (args.num_rollout or 0) * args.rollout_batch_size * args.n_samples_per_prompt
    return max(samples // args.global_batch_size if args.global_batch_size else args.num_rollout or 1, 1)


def _wsd(style: str, ratio: float) -> float:
    if style == "linear":
        return 1.0 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "exponential":
        return 2.0 * 0.5**ratio - 1.0
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(ratio)
    raise ValueError(f"unknown --lr-wsd-decay-style {style!r}")
