"""A distributed optimizer's step from bf16 gradients without a float32 copy of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

PIECE_BYTES = 2**30


class _Pair(NamedTuple):
    model: Tensor
    main: Tensor
    start: int
    end: int


class StreamedGradients:
    """Megatron copies all gradients of a ``--grad-reduce-in-bf16`` buffer to float32 at once, which takes another four
    bytes a parameter beside weights, gradients and optimizer. Here each piece is copied, used and freed in turn: once
    for the norm, once for the step.

    Args:
        optimizer: one of Megatron's distributed optimizers.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def pieces(self) -> list[list[_Pair]]:
        """Parameters whose gradients are float32 at the same time; made anew, since loading may replace tensors."""
        return [] if self.optimizer.is_stub_optimizer else _pieces(self.optimizer)

    def squared_norm(self) -> float:
        """Of the gradients of all ranks that this optimizer knows of; every rank must ask."""
        total = torch.zeros(1, device=torch.cuda.current_device() if torch.cuda.is_available() else "cpu")
        for _ in self._in_turn():
            gradients = self.optimizer.get_main_grads_for_grad_norm()
            if gradients:
                total += torch.stack(torch._foreach_norm(gradients)).square().sum()
        torch.distributed.all_reduce(total, group=self.optimizer.get_grad_stats_parallel_group())
        return float(total)

    def step(self, scale: float) -> None:
        """Update the main parameters with the gradients times ``scale``; model parameters are as before."""
        for piece in self._in_turn():
            if scale != 1.0:
                torch._foreach_mul_([pair.main.grad for pair in piece if pair.main.grad is not None], scale)
            self.optimizer.optimizer.step()

    def _in_turn(self) -> Iterator[list[_Pair]]:
        """Pieces, each with its gradients in place."""
        for piece in self.pieces:
            for model, main, start, end in piece:
                main.grad = model.main_grad.view(-1)[start:end].float()  # type: ignore[attr-defined]
            yield piece
            for pair in piece:
                pair.main.grad = None


def _pieces(optimizer: Any) -> list[list[_Pair]]:
    models = [*optimizer.model_float16_groups, *optimizer.model_fp32_groups]
    mains = [*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups]
    pieces: list[list[_Pair]] = []
    size = PIECE_BYTES
    for model_group, main_group in zip(models, mains, strict=True):
        for model, main in zip(model_group, main_group, strict=True):
            if size >= PIECE_BYTES:
                pieces.append([])
                size = 0
            own = optimizer._get_model_param_range_map(model)["param"]
            pieces[-1].append(_Pair(model, main, own.start, own.end))
            size += 4 * own.size
    return pieces
