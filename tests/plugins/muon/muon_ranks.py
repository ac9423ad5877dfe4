"""What the two ranks of ``test_muon.py`` run, and a plain reference in float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fsdp_helpers import make_args, make_samples, weights_of
from fsdp_ranks import optimizer_state, train
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from slime.backends.create import create_backend
from slime.backends.fsdp.backend import FsdpBackend
from slime.backends.lr_schedule import LrSchedule
from slime.plugins.muon.optimizer import ScheduledMuon

RANKS = 2
SHAPES = {
    "embed_tokens.weight": (11, 6),
    "layers.0.wide.weight": (4, 9),
    "layers.0.tall.weight": (9, 4),
    "layers.0.odd.weight": (7, 5),  # four rows and three
    "layers.1.one.weight": (1, 5),  # a rank without a row
    "layers.0.mlp.experts.up": (3, 4, 6),
    "layers.0.conv.weight": (5, 1, 3),
    "layers.0.bias": (8,),
    "norm.weight": (6,),
    "lm_head.weight": (11, 6),
}
MATRICES = tuple(n for n, s in SHAPES.items() if "layers" in n and len(s) > 1 and "conv" not in n)
FLAGS: dict[str, Any] = dict(lr=0.02, weight_decay=0.1, optimizer="muon")


def drawn(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def reference(steps: int, **flags: Any) -> dict[str, Tensor]:
    """The weights after ``steps``, matrix by matrix in float64."""
    args = make_args("model", **FLAGS | flags)
    found = {}
    for name, start in drawn(0).items():
        gradients = [drawn(step)[name].double() for step in range(1, steps + 1)]
        weight = start.double()
        if name not in MATRICES:
            found[name] = _adam(weight, gradients, args)
            continue
        one_by_one = weight.ndim == 3
        parts = weight.unbind() if one_by_one else [weight]
        of_parts = [g.unbind() if one_by_one else [g] for g in gradients]
        done = [_muon(w, [g[i] for g in of_parts], args) for i, w in enumerate(parts)]
        found[name] = torch.stack(done) if one_by_one else done[0]
    return found


def _muon(weight: Tensor, gradients: list[Tensor], args: Any) -> Tensor:
    momentum = torch.zeros_like(weight)
    mu = args.muon_momentum
    m, n = weight.shape
    scale = {
        "spectral": max(m, n) ** 0.5,
        "shape_scaling": max(1, m / n) ** 0.5,
        "unit_rms_norm": (m / n) ** 0.5,
    }[args.muon_scale_mode] * args.muon_extra_scale_factor
    for gradient in gradients:
        momentum = mu * momentum + (1 - mu) * gradient
        x = (1 - mu) * gradient + mu * momentum if args.muon_use_nesterov else momentum
        x = x / x.norm()
        for _ in range(args.muon_num_ns_steps):
            # applies an odd polynomial to the singular values
            u, s, vh = torch.linalg.svd(x, full_matrices=False)
            x = u @ torch.diag(3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5) @ vh
        weight = weight - args.lr * (scale * x + args.weight_decay * weight)
    return weight


def _adam(weight: Tensor, gradients: list[Tensor], args: Any) -> Tensor:
    decay = args.weight_decay if weight.ndim >= 2 else 0.0
    first = second = torch.zeros_like(weight)
    for t, gradient in enumerate(gradients, 1):
        first = args.adam_beta1 * first + (1 - args.adam_beta1) * gradient
        second = args.adam_beta2 * second + (1 - args.adam_beta2) * gradient**2
        step = first / (1 - args.adam_beta1**t)
        size = (second / (1 - args.adam_beta2**t)).sqrt() + args.adam_eps
        weight = weight * (1 - args.lr * decay) - args.lr * step / size
    return weight


def stepped(steps: int, ranks: int = 1, **flags: Any) -> dict[str, Tensor]:
    """The same by the optimizer; with several ranks, its tensors are sharded by rows."""
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None

    def shared(tensor: Tensor) -> Tensor:
        return tensor if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)])

    named = {name: nn.Parameter(shared(tensor)) for name, tensor in drawn(0).items()}
    args = make_args("model", **FLAGS | flags)
    optimizer = ScheduledMuon(list(named.items()), args, LrSchedule.from_args(args, "actor"))
    for step in range(1, steps + 1):
        for name, gradient in drawn(step).items():
            named[name].grad = shared(gradient)
        optimizer.step(0.0)
    return {name: whole(p.detach()) for name, p in named.items()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(
    models: Mapping[str, Path], rank: int, world_size: int, port: int, save: Path
) -> dict[str, Any]:
    """Two steps of a model; then two more of one that reads the snapshot between them."""
    found: dict[str, Any] = {}
    for name, model in models.items():
        args = make_args(model, **FLAGS)

        def make(args: Any = args) -> FsdpBackend:
            made = create_backend(args, "actor", rank, world_size, "127.0.0.1", port)
            assert isinstance(made, FsdpBackend)
            return made

        backend = make()
        losses = [train(backend, make_samples())]
        backend.save(save / name)
        losses.append(train(backend, make_samples(seed=3)))
        again = make()
        again.load(save / name)
        found[name] = dict(
            losses=losses,
            weights=weights_of(backend),
            again=train(again, make_samples(seed=3)),
            weights_again=weights_of(again),
            state=optimizer_state(backend),
        )
    return found


def worker(rank: int, models: Mapping[str, Path], port: int, folder: Path) -> None:
    result = trained(models, rank, RANKS, port, folder / "saved")
    result["steps"] = stepped(3, RANKS)
    torch.save(result, folder / f"rank{rank}.pt")
