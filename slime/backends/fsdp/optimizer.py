"""AdamW with a schedule and gradient clipping, its moments of 8 bits, and the scale of the loss in
float16.

``--optimizer-8bit`` and ``--bf16-master-weights`` use the AdamW of torchao. A moment has 8 bits per
value and a float32 scale per block of up to 256 values of a row (Dettmers et al., 8-bit Optimizers
via Block-wise Quantization, 2021), also that of a tensor with the matrices of all experts of a
layer. Matrices whose rows no block size divides, and vectors, have float32 moments. Weights in
bfloat16 are rounded stochastically, so that updates smaller than half a step are not lost: in
expectation, the rounded weight is the updated one.

In float16 (``--fp16``), gradients below 6e-8 are 0. The loss of each micro-batch is multiplied by a
scale, and the gradients are divided by it in float32. If one of them overflows, the step is left
out and the scale halved; after ``--loss-scale-window`` steps without an overflow it is doubled.
Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from slime.backends.collectives import local, sharded_like
from slime.backends.lr_schedule import LrSchedule
from slime.config.args import Args
from slime.config.trainer import TrainingPrecisionConfig
from slime.types import AdamSettings


@dataclass
class LossScale:
    """The scale of the loss.

    Attributes:
        value: The current scale, a positive number.
        smallest: The scale is not lowered below this.
        window: Steps without an overflow after which the scale is doubled; None for a constant
            scale.
        passed: Steps since the last overflow or change.
    """

    value: float
    smallest: float
    window: int | None
    passed: int = 0

    @classmethod
    def of(cls, precision: TrainingPrecisionConfig, dtype: str) -> LossScale | None:
        """Return the scale at the start of a run; None unless it trains in float16."""
        if dtype != "float16":
            return None
        constant = precision.loss_scale
        if constant is not None:
            return cls(constant, constant, None)
        smallest = precision.min_loss_scale
        return cls(precision.initial_loss_scale, smallest, precision.loss_scale_window)

    @property
    def can_be_lowered(self) -> bool:
        return self.window is not None and self.value > self.smallest

    def after_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Choose the next scale, and return what is logged of the step with these metrics. A step
        that was left out, because its gradients overflowed, has no ``grad_norm``.
        """
        if "grad_norm" not in metrics:
            self.value = max(self.value / 2, self.smallest)
            self.passed = 0
            return {"loss_scale": self.value, "skipped_step": 1.0}
        self.passed += 1
        if self.window is not None and self.passed >= self.window:
            self.value = self.value * 2
            self.passed = 0
        return {"loss_scale": self.value, "skipped_step": 0.0}

    def state(self) -> dict[str, float]:
        """Return what a snapshot must contain."""
        return {"value": self.value, "passed": self.passed}

    def load(self, state: dict[str, float]) -> None:
        """Go on from the state of a snapshot. A constant scale (``--loss-scale``) stays as the flag
        gives it.
        """
        if self.window is not None:
            self.value = max(float(state["value"]), self.smallest)
            self.passed = int(state["passed"])


BLOCKS = (256, 128, 64)
"""Sizes of blocks, the preferred one first. One that divides a row lets a snapshot be divided by
rows.
"""
SMALLEST = 4096  # elements; smaller matrices have float32 moments, as in torchao


def small_adam(
    groups: list[dict[str, Any]], betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """Return torchao's AdamW, whose states :func:`first_state` must make. It rounds bfloat16
    weights stochastically.
    """
    from torchao.optim import AdamW8bit

    adam: torch.optim.Optimizer = AdamW8bit(
        groups, lr=0.0, betas=betas, eps=eps, bf16_stochastic_round=True
    )
    return adam


def first_state(parameter: nn.Parameter, eight_bits: bool) -> dict[str, Tensor]:
    """Return the state of a parameter before the first step."""
    block = _block_size(parameter) if eight_bits else None
    zeros = torch.zeros_like(parameter, dtype=torch.float32)
    if block is None:
        moments = [zeros, torch.zeros_like(zeros)]
    else:
        moments = [_in_8_bits(parameter, signed, block) for signed in (True, False)]
    # The CPU scalar is an input of the compiled step, as torchao's own state has it.
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": moments[0],
        "exp_avg_sq": moments[1],
    }


def _block_size(parameter: nn.Parameter) -> int | None:
    """Return the size of the blocks; None if the moments of a parameter cannot have 8 bits."""
    if parameter.dim() < 2 or parameter.numel() < SMALLEST:
        return None
    if isinstance(parameter, DTensor):
        sharded = [n for n, place in enumerate(parameter.placements) if isinstance(place, Shard)]
        if any(parameter.shape[0] % parameter.device_mesh.size(n) for n in sharded):
            return None  # ranks with fewer rows, or none
    return next((size for size in BLOCKS if parameter.shape[-1] % size == 0), None)


def _in_8_bits(parameter: nn.Parameter, signed: bool, block: int) -> Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit

    part = local(parameter.detach())
    zeros: Tensor = OptimState8bit.zeros(
        part.shape, signed, block, part.device, dtype=torch.float32
    )
    return sharded_like(zeros, parameter)


def take_step(adam: torch.optim.Optimizer) -> None:
    """Run one step. Without a GPU it is not compiled, since compiling takes longer than many steps
    of a small model.
    """
    on_cpu = all(
        local(p).device.type == "cpu" for group in adam.param_groups for p in group["params"]
    )
    with torch.compiler.set_stance("force_eager" if on_cpu else "default"):
        adam.step()


def set_lr(adam: torch.optim.Optimizer, lr: float) -> None:
    for group in adam.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def plain_tensors(parameter: nn.Parameter, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state as tensors without subclasses, which share its memory: an 8-bit moment as
    ``codes`` (uint8) and ``scale`` (float32, one column per block of a row, or of an expert's
    matrix)."""
    found: dict[str, Tensor] = {}
    for entry, value in state.items():
        part = local(value)
        if hasattr(part, "codes") and hasattr(part, "scale"):
            rows = part.codes.shape[0]
            scale = part.scale.view(rows, -1)
            found[f"{entry}.codes"] = sharded_like(part.codes, parameter)
            found[f"{entry}.scale"] = sharded_like(
                scale, parameter, (parameter.shape[0], scale.shape[1])
            )
        else:
            found[entry] = value
    return found


NamedParameters = list[tuple[str, nn.Parameter]]


class ScheduledAdamW:
    """AdamW for the trainable parameters, with the learning rate of a schedule.

    Moments exist from the start, so that state dicts always have the same entries. With
    ``--use-stateless-adam`` they exist only during a step, and the update is lr · g / (|g| + eps).
    As in Megatron, weight decay is not applied to vectors (norms, biases).
    """

    def __init__(
        self,
        named: NamedParameters,
        args: Args,
        schedule: LrSchedule,
        over_ranks: Callable[[float], float] = float,
    ) -> None:
        """
        Args:
            over_ranks: Converts a sum over this rank's shards to the sum over the whole model, as a
                collective operation.
        """
        self.named = [(name, p) for name, p in named if p.requires_grad]
        self.schedule = schedule
        self.flags = AdamSettings(
            schedule.max_lr,
            args.adam_beta1,
            args.adam_beta2,
            args.adam_eps,
            args.weight_decay,
            args.clip_grad,
        )
        self.over_ranks = over_ranks
        self.loss_scale = LossScale.of(args, args.train_dtype)
        """The scale of the gradients until :meth:`unscale`; None for 1."""
        self.threads = ThreadPoolExecutor() if args.fsdp_cpu_offload else None
        """What computes norms on the CPU, for each of which torch uses one thread."""
        self.steps = 0
        self.stateless = args.use_stateless_adam
        # Vectors (norms, biases) get no weight decay, as in Megatron. torch refuses a group without
        # parameters.
        decay = [p for _, p in self.named if p.ndim >= 2]
        rest = [p for _, p in self.named if p.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": decay, "weight_decay": args.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self.by_torchao = args.optimizer_8bit or args.bf16_master_weights
        self.args = args
        self.adam = self.make(groups)

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the optimizer of the groups that have parameters, with its state before the first
        step, so that a snapshot can be read."""
        args = self.args
        betas = (args.adam_beta1, args.adam_beta2)
        eps = args.adam_eps
        parameters = [p for group in groups for p in group["params"]]
        # torchao's AdamW has states of its own.
        if self.by_torchao:
            adam = small_adam(groups, betas, eps)
            adam.state.update((p, first_state(p, args.optimizer_8bit)) for p in parameters)
            return adam
        # Fused AdamW reads and writes everything once. For SmolLM2 on two cores it takes 0.06 s,
        # and foreach 0.23 s.
        adam = torch.optim.AdamW(groups, lr=self.lr, betas=betas, eps=eps, fused=True)
        for p in [] if self.stateless else parameters:
            adam.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=local(p).device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        return adam

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for _, p in self.named]

    def gradients(self) -> list[Tensor]:
        """Return this rank's shards of the gradients, without parameters that have none."""
        return [local(p.grad) for p in self.parameters if p.grad is not None]

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.schedule.lr(self.steps)

    def zero_grad(self) -> None:
        self.adam.zero_grad()

    @torch.no_grad()
    def unscale(self, factor: float = 1.0) -> None:
        """Multiply the gradients by ``factor``, and divide them by the scale of the loss."""
        gradients = self.gradients()
        factor /= 1.0 if self.loss_scale is None else self.loss_scale.value
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Return the norm of the gradients of all ranks, exactly the same on each.

        If the clipping of replicas differed in the last bit, the replicas would diverge.
        """
        gradients = [gradient for gradient in self.gradients() if gradient.numel()]
        squares = 0.0
        if gradients:
            norm = partial(torch._foreach_norm, ord=2, dtype=torch.float32)
            if self.threads is None:
                norms = torch.stack(norm(gradients))
            else:
                norms = torch.cat(list(map(torch.stack, self.threads.map(norm, zip(gradients)))))
            squares = float(norms.double().square().sum())
        return math.sqrt(self.over_ranks(squares))

    @torch.no_grad()
    def step(self, norm: float, settings: AdamSettings | None = None) -> float:
        """Update the weights with gradients clipped from ``norm`` to ``--clip-grad`` (0 for no
        clipping).

        Returns the learning rate.

        A parameter without a gradient gets a gradient of zero, because its moments must decay too.

        Args:
            settings: The settings of this step, in place of those of the flags.
        """
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        used = self.flags if settings is None else settings
        self._use(used)
        if used.clip_grad > 0 and norm > used.clip_grad:
            torch._foreach_mul_(self.gradients(), used.clip_grad / (norm + 1e-6))
        lr = self.lr if settings is None else settings.lr
        set_lr(self.adam, lr)
        if self.by_torchao:
            take_step(self.adam)
        else:
            self.adam.step()
        if self.stateless:
            self.adam.state.clear()
        self.steps += 1
        return lr

    def _use(self, settings: AdamSettings) -> None:
        for group in self.adam.param_groups:
            group["betas"] = (settings.beta1, settings.beta2)
            group["eps"] = settings.eps
            if group["params"][0].ndim >= 2:
                group["weight_decay"] = settings.weight_decay

    def reset(self) -> None:
        """Zero the moments (``--reset-optimizer-states``)."""
        for value in self.tensors().values():
            local(value).zero_()

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint, by ``<entry>/<parameter name>``."""
        state = self.adam.state
        known = [(name, p) for name, p in self.named if p in state]
        return {
            f"{entry}/{name}": x
            for name, p in known
            for entry, x in plain_tensors(p, state[p]).items()
        }
