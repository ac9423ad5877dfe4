"""AdamW with a schedule and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from slime.backends.collectives import local
from slime.backends.lr_schedule import LrSchedule
from slime.config.args import Args

NamedParameters = list[tuple[str, nn.Parameter]]


class ScheduledAdamW:
    """AdamW over the trainable parameters; ``step`` takes the learning rate from the schedule.

    Moments exist from the start, so that state dicts always have the same entries; with
    ``--use-stateless-adam`` only during a step, which is then lr · g / (|g| + eps). Weight decay leaves out
    vectors (norms, biases), as Megatron does.
    """

    def __init__(
        self, named: NamedParameters, args: Args, schedule: LrSchedule, over_ranks: Callable[[float], float] = float
    ) -> None:
        """
        Args:
            over_ranks: from a sum over this rank's shards to that over the whole model; a collective.
        """
        self.named = [(name, p) for name, p in named if p.requires_grad]
        self.schedule, self.clip_grad = schedule, args.clip_grad
        self.over_ranks = over_ranks
        self.steps = 0
        self.stateless = args.use_stateless_adam
        decay = [p for _, p in self.named if p.ndim >= 2]
        rest = [p for _, p in self.named if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": args.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        # Fused AdamW reads and writes everything once: SmolLM2 on two cores 0.06 s, foreach 0.23 s.
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=schedule.lr(0),
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_eps,
            fused=True,
        )
        for _, p in [] if self.stateless else self.named:
            self.adam.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=local(p).device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for _, p in self.named]

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.schedule.lr(self.steps)

    def zero_grad(self) -> None:
        self.adam.zero_grad(set_to_none=True)

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Over the gradients of all ranks, exactly the same on each: replicas whose clipping differed in the last bit
        would drift apart."""
        gradients = [local(p.grad) for p in self.parameters if p.grad is not None]
        gradients = [g for g in gradients if g.numel()]
        squares = 0.0
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
            squares = float(norms.double().square().sum())
        return math.sqrt(self.over_ranks(squares))

    @torch.no_grad()
    def step(self, norm: float) -> float:
        """Update with gradients clipped from ``norm`` to ``--clip-grad`` (0: not at all); returns the learning rate
        that was used.

        A parameter without a gradient gets one of zero, for its moments decay all the same.
        """
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if self.clip_grad > 0 and norm > self.clip_grad:
            gradients = [local(p.grad) for p in self.parameters if p.grad is not None]
            torch._foreach_mul_(gradients, self.clip_grad / (norm + 1e-6))
        lr = self.lr
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        if self.stateless:
            self.adam.state.clear()
        self.steps += 1
        return lr

    def reset(self) -> None:
        """Zero the moments (``--reset-optimizer-states``)."""
        for state in self.adam.state.values():
            for value in state.values():
                local(value).zero_()

    def tensors(self) -> dict[str, Tensor]:
        """The state by ``<entry>/<parameter name>``: what a checkpoint holds."""
        state = self.adam.state
        return {f"{entry}/{name}": x for name, p in self.named if p in state for entry, x in state[p].items()}
