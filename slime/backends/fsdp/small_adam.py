"""AdamW of torchao, for moments of 8 bits (``--optimizer-8bit``) and weights in bfloat16 (``--bf16-master-weights``).

A moment has 8 bits per value and a float32 scale per block of up to 256 values of a row (Dettmers et al., 8-bit
Optimizers via Block-wise Quantization, 2021), also that of a tensor with the matrices of all experts of a layer.
Matrices whose rows no block size divides, and vectors, have float32 moments. Weights in bfloat16 are rounded
stochastically, so that updates smaller than half a step are not lost: in expectation, the rounded weight is the updated
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from slime.backends.collectives import local

if TYPE_CHECKING:
    pass

BLOCKS = (256, 128, 64)
"""Sizes of blocks, the preferred one first. One that divides a row lets a snapshot be divided by rows."""
SMALLEST = 4096  # elements; smaller matrices have float32 moments, as in torchao


def small_adam(groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """Return torchao's AdamW, whose states :func:`first_state` must make. It rounds bfloat16 weights stochastically."""
    from torchao.optim import AdamW8bit

    adam: torch.optim.Optimizer = AdamW8bit(groups, lr=0.0, betas=betas, eps=eps, bf16_stochastic_round=True)
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
    return {"step": torch.zeros((), dtype=torch.float32), "exp_avg": moments[0], "exp_avg_sq": moments[1]}


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
    zeros: Tensor = OptimState8bit.zeros(part.shape, signed, block, part.device, dtype=torch.float32)
    return _like(parameter, zeros)


def _like(parameter: nn.Parameter, part: Tensor, columns: int | None = None) -> Tensor:
    """Return a tensor that has ``part`` on this rank and is sharded as ``parameter``.

    Args:
        columns: The size of its second and last dimension; None for the shape of ``parameter``.
    """
    if not isinstance(parameter, DTensor):
        return part
    shape = parameter.shape if columns is None else torch.Size((parameter.shape[0], columns))
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def take_step(adam: torch.optim.Optimizer) -> None:
    """Run one step. Without a GPU it is not compiled, since compiling takes longer than many steps of a small model."""
    on_cpu = all(local(p).device.type == "cpu" for group in adam.param_groups for p in group["params"])
    with torch.compiler.set_stance("force_eager" if on_cpu else "default"):
        adam.step()


def set_lr(adam: torch.optim.Optimizer, lr: float) -> None:
    for group in adam.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def plain_tensors(parameter: nn.Parameter, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state as tensors without subclasses, which share its memory: an 8-bit moment as ``codes`` (uint8) and
    ``scale`` (float32, one column per block of a row, or of an expert's matrix)."""
    found: dict[str, Tensor] = {}
    for entry, value in state.items():
        part = local(value)
        if hasattr(part, "codes") and hasattr(part, "scale"):
            rows = part.codes.shape[0]
            scale = part.scale.view(rows, -1)
            found[f"{entry}.codes"] = _like(parameter, part.codes)
            found[f"{entry}.scale"] = _like(parameter, scale, scale.shape[1])
        else:
            found[entry] = value
    return found
