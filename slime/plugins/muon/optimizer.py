"""Muon: the update of a matrix is its momentum with all singular values near 1.

With the gradient G of a matrix ``[m, n]``: M ← μ·M + (1 − μ)·G, U = (1 − μ)·G + μ·M (Nesterov) or M,
W ← W − lr·(s·NS(U) + λ·W). NS is the quintic iteration of Newton and Schulz on U / ‖U‖_F:
X ← aX + (bA + cA²)X with A = XXᵀ, (a, b, c) = (3.4445, −4.7750, 2.0315). Source: Keller Jordan et al.,
"Muon: An optimizer for hidden layers in neural networks" (2024). s = 0.2·√max(m, n), with which the
root mean square of an update is about Adam's: Liu et al., "Muon is Scalable for LLM Training"
(Moonshot, arXiv 2502.16982).

Embeddings, the head, norms, biases and convolutions are trained with AdamW. A tensor with the
matrices of all experts of a layer is updated expert by expert.

FSDP shards a matrix by rows. The ranks of a replica exchange so many matrices at a time as they
are: each gets the rows of one of them, orthogonalizes it, and sends the rows back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from slime.backends.collectives import local
from slime.backends.fsdp.optimizer import ScheduledAdamW
from slime.config.flag import section
from slime.plugins.muon import MuonFlags

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_OF_LAYER = re.compile(r"\.\d+\.")


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon trains a parameter: a matrix of a numbered layer, or those of its experts."""
    if not _OF_LAYER.search(name):
        return False
    return parameter.ndim == 2 or (parameter.ndim == 3 and "expert" in name)


def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """Return matrices whose singular values are between about 0.7 and 1.2, with the singular
    vectors of ``matrices``, ``[..., m, n]``, in whose dtype it is computed."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
}
"""By ``--muon-scale-mode``."""


class Muon(torch.optim.Optimizer):
    """Muon for the first group of parameters, and ``adam`` for its own, which follow.

    Its state has a ``momentum_buffer`` for each matrix from the start, so that a snapshot can be
    read before the first step.

    Args:
        dtype: Of the iteration and of what ranks exchange.
    """

    def __init__(
        self,
        matrices: dict[str, Any],
        adam: torch.optim.Optimizer,
        flags: MuonFlags,
        dtype: torch.dtype,
    ) -> None:
        super().__init__([matrices], {})
        self.adam = adam
        self.flags = flags
        self.dtype = dtype
        # The largest first: those that are exchanged together have about the same size.
        matrices["params"].sort(key=lambda p: -p.numel())
        # One state and one list of groups, whose learning rate and decay others set.
        self.state.update(adam.state)
        adam.state = self.state
        self.param_groups += adam.param_groups
        for p in matrices["params"]:
            self.state[p] = {"momentum_buffer": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        matrices: list[nn.Parameter] = self.param_groups[0]["params"]
        first = 0
        while first < len(matrices):
            together = matrices[first : first + shard_group(matrices[first])[1]]
            # Those of experts are not exchanged.
            count = next((i for i, p in enumerate(together) if p.ndim != together[0].ndim), None)
            self._update(together[:count])
            first += len(together[:count])
        self.adam.step()

    def _update(self, matrices: Sequence[nn.Parameter]) -> None:
        group = self.param_groups[0]
        momentum = self.flags.muon_momentum
        updates = []
        for p in matrices:
            assert p.grad is not None, "parameters without a gradient have one of zeros"
            gradient = local(p.grad)
            average = local(self.state[p]["momentum_buffer"])
            average.lerp_(gradient, 1 - momentum)
            update = gradient.lerp(average, momentum) if self.flags.muon_use_nesterov else average
            updates.append(update.to(self.dtype))
        for p, update in zip(matrices, self._orthogonal(matrices, updates), strict=True):
            rows, columns = p.shape[-2:]
            scale = SCALES[self.flags.muon_scale_mode](rows, columns)
            weight = local(p)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            factor = group["lr"] * scale * self.flags.muon_extra_scale_factor
            weight.add_(update.to(weight.dtype), alpha=-factor)

    def _orthogonal(
        self, matrices: Sequence[nn.Parameter], parts: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return this rank's rows of the orthogonalized matrices, of which ``parts`` are its rows.

        A collective operation of the ranks that share a replica, at most one matrix for each.
        """
        steps = self.flags.muon_num_ns_steps
        group, ranks = shard_group(matrices[0])
        if ranks == 1 or matrices[0].ndim == 3:
            return [newton_schulz(part, steps) if part.numel() else part for part in parts]
        rank = dist.get_rank(group)
        mine = matrices[rank] if rank < len(matrices) else None
        sizes = [0] * ranks if mine is None else row_counts(mine.shape[0], ranks)
        received = [count * mine.shape[1] for count in sizes] if mine is not None else sizes
        sent = [part.numel() for part in parts] + [0] * (ranks - len(parts))
        flat = torch.cat([part.flatten() for part in parts])
        whole = flat.new_empty(sum(received))
        dist.all_to_all_single(whole, flat, received, sent, group=group)
        if mine is not None:
            whole = newton_schulz(whole.view(mine.shape), steps).flatten()
        back = torch.empty_like(flat)
        dist.all_to_all_single(back, whole.contiguous(), sent, received, group=group)
        split = back.split(sent[: len(parts)])
        return [one.view_as(part) for one, part in zip(split, parts, strict=True)]


def shard_group(parameter: Tensor) -> tuple[dist.ProcessGroup | None, int]:
    """Return the ranks that hold the rows of one copy of a parameter, and their number."""
    if not isinstance(parameter, DTensor):
        return None, 1
    mesh = parameter.device_mesh
    dim = next(n for n, place in enumerate(parameter.placements) if isinstance(place, Shard))
    return mesh.get_group(dim), mesh.size(dim)


def row_counts(rows: int, ranks: int) -> list[int]:
    """Return how many rows each rank has, as FSDP divides them."""
    most = math.ceil(rows / ranks)
    return [min(most, max(rows - rank * most, 0)) for rank in range(ranks)]


class ScheduledMuon(ScheduledAdamW):
    """Muon with the learning rate of a schedule, for ``--optimizer muon``."""

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """
        Raises:
            ValueError: No matrix of a layer is trained.
        """
        matrices = [p for name, p in self.named if is_matrix(name, p)]
        if not matrices:
            raise ValueError(
                "--optimizer muon: no matrix of a layer is trained (--only-train-params-name-list, "
                "--freeze-params-name-list); use --optimizer adam"
            )
        taken = {id(p) for p in matrices}
        others = [
            group | {"params": [p for p in group["params"] if id(p) not in taken]}
            for group in groups
        ]
        # The rest as ever.
        adam = super().make([group for group in others if group["params"]])
        own = {"params": matrices, "lr": 0.0, "weight_decay": self.flags.weight_decay}
        dtype = torch.float32 if self.args.train_dtype == "float32" else torch.bfloat16
        return Muon(own, adam, section(MuonFlags, self.args), dtype)
