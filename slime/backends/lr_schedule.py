"""The learning-rate schedules of Megatron, as functions of the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from slime.config.args import Args


@dataclass(frozen=True)
class LrSchedule:
    """The learning rate of optimizer step k (from 0), with the formulas of Megatron's
    OptimizerParamScheduler.

    Megatron counts samples instead of steps, which is equivalent if all steps have the same size.

    Warm-up: ``init + (max − init)·k/warmup`` for k ≤ warmup. After it, with r = (k − warmup)/(decay
    − warmup): linear ``1 − r`` and cosine ``(cos πr + 1)/2``, both from max to min;
    inverse-square-root ``max·√(warmup/k)``, but at least min; WSD: max until ``decay − wsd_decay``,
    then a decay with one of four shapes. After ``decay``, the learning rate is min, except with the
    constant schedule.
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
    def from_args(cls, args: Args, role: str = "actor") -> LrSchedule:
        """Read the flags. A critic uses ``--critic-lr`` and ``--critic-lr-warmup-iters`` if they
        are given.

        Raises:
            ValueError: The schedule depends on the length of the run, and ``num_rollout`` is not
                known yet; or the warm-up is as long as the decay.
        """
        # The length of the decay: given in steps, or that of the whole run.
        critic = role == "critic"
        constant = args.lr_decay_style == "constant" and not args.lr_warmup_fraction
        decay = args.lr_decay_iters or (
            1 if constant and args.num_rollout is None else planned_steps(args, role)
        )
        # The warm-up may be a part of the decay, and a critic may have its own.
        warmup = args.lr_warmup_iters or 0
        if args.lr_warmup_fraction:
            warmup = int(args.lr_warmup_fraction * decay)
        if critic and args.critic_lr_warmup_iters is not None:
            warmup = args.critic_lr_warmup_iters
        if args.lr_decay_style != "constant" and warmup >= decay:
            raise ValueError(
                f"a warm-up of {warmup} steps leaves no steps of a decay over {decay} steps "
                "(--lr-decay-iters, or --num-rollout x samples / --global-batch-size): lower "
                "--lr-warmup-iters"
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
            return max(
                self.min_lr, self.max_lr * math.sqrt(max(self.warmup_steps, 1) / max(step, 1))
            )
        return self.min_lr + self._coefficient(step) * (self.max_lr - self.min_lr)

    def _coefficient(self, step: int) -> float:
        ratio = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        if self.style != "WSD":
            return _decay("--lr-decay-style", self.style, ratio)
        start = self.decay_steps - self.wsd_decay_steps
        return (
            1.0
            if step <= start
            else _decay(
                "--lr-wsd-decay-style", self.wsd_style, (step - start) / self.wsd_decay_steps
            )
        )


def planned_steps(args: Args, role: str = "actor") -> int:
    """Return the number of optimizer steps of a role in the whole run, at least 1.

    The actor is not trained in the first ``--num-critic-only-steps`` rollouts.

    Raises:
        ValueError: ``num_rollout`` is not known. The driver sets it from ``--num-epoch`` and the
            data source before the trainers start.
    """
    if args.num_rollout is None:
        raise ValueError(
            "the learning rate's decay or warm-up fraction depends on the number of rollouts, "
            "which is not known: give --num-rollout or --lr-decay-iters"
        )
    rollouts = args.num_rollout
    if role == "actor" and args.use_critic:
        rollouts = max(rollouts - args.num_critic_only_steps, 0)
    samples = rollouts * args.rollout_batch_size * args.n_samples_per_prompt
    return max(samples // args.global_batch_size if args.global_batch_size else rollouts, 1)


def zero_lr_warning(metrics: Mapping[str, float], rollout_id: int, warms_up: bool) -> str | None:
    """Return a warning if the learning rate of a step was 0, so that the weights did not change;
    otherwise None.

    There is no warning for the first step of a warm-up from 0.

    Args:
        metrics: The metrics of the step, with ``train/lr-pg_0`` if the actor was trained and
            ``train/critic-lr-pg_0`` if the critic was.
        warms_up: Whether the learning rate of a role has a warm-up.
    """
    rates = {"actor": "train/lr-pg_0", "critic": "train/critic-lr-pg_0"}
    idle = [role for role, name in rates.items() if metrics.get(name) == 0.0]
    if not idle or (rollout_id == 0 and warms_up):
        return None
    return (
        f"the learning rate of the {' and the '.join(idle)} was 0 in a step, which changed no "
        "weights: check --lr, --min-lr, --lr-decay-iters and --num-rollout"
    )


def _decay(flag: str, style: str, ratio: float) -> float:
    """Return the part of the learning rate that remains after ``ratio`` of a decay."""
    if style == "linear":
        return 1.0 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "exponential":
        return 2.0 * 0.5**ratio - 1.0
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(ratio)
    raise ValueError(f"unknown {flag} {style!r}")
