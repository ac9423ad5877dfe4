"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) on the linear layers of a Hugging Face
model.

A linear layer with an adapter computes ``W x + s B A x``. ``A [rank, in]`` and ``B [out, rank]``
are trained, ``W`` is frozen, and ``s`` is ``alpha / rank``, or ``alpha / sqrt(rank)`` with rsLoRA
(https://arxiv.org/abs/2312.03732). ``A`` and ``B`` are parameters of the layer itself, so the names
of all other parameters do not change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slime.models.cpu_kernels import CpuLinear, linear
from slime.models.shards import ModelError

ALL_LINEAR = "all-linear"
EXPERTS = "experts"
"""The name in ``--lora-target-modules`` that selects all routed experts; see
:mod:`slime.models.lora_experts`.
"""
_ROUTERS = ("gate", "router", "shared_expert_gate")
"""Linear layers that choose experts. ``all-linear`` does not contain them: engines have no adapters
for them.
"""


@dataclass(frozen=True)
class LoraSettings:
    """The shape of an adapter, and the layers that have one.

    Attributes:
        dropout: The probability with which inputs of the adapter are zeroed in forward passes that
            have a gradient.
        init: The initialization of ``A``: ``kaiming`` (uniform, as in nn.Linear) or ``gaussian``
            (N(0, 1/rank²), as in PEFT). ``B`` is always zero, so that training starts with the
            model itself.
        targets, exclude: Names of modules, see :func:`selects`. ``all-linear`` stands for all
            linear layers in decoder layers, except those that choose experts, and ``experts`` for
            the routed experts, which are no linear layers.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    rslora: bool = False
    init: str = "kaiming"
    targets: tuple[str, ...] = (ALL_LINEAR,)
    exclude: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """The factor ``s`` of ``s B A x``."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. Its own weight and bias are frozen.

    Attributes:
        lora_A, lora_B: The trained factors, float32 ``[rank, in]`` and ``[out, rank]``.
        lora_scale: The factor ``s``.
        lora_on: Whether ``forward`` adds the adapter. If not, it computes exactly what it would
            without one.
        lora_rows: The rows ``[n, 1]`` of the input ``[..., n, in]`` to which the adapter is
            applied; None for all.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float
    lora_dropout: float
    lora_on: bool
    lora_rows: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        base = self.plain(input)
        if not self.lora_on:
            return base
        if self.lora_dropout and torch.is_grad_enabled():
            input = F.dropout(input, self.lora_dropout)
        return base + self.adapter(input)

    def plain(self, input: Tensor) -> Tensor:
        """Return ``W x`` plus the bias."""
        return linear(input, self.weight, self.bias)

    def adapter(self, input: Tensor) -> Tensor:
        """Return ``s B A x``."""
        added = linear(linear(input, self.lora_A) * self.lora_scale, self.lora_B)
        return added if self.lora_rows is None else torch.where(self.lora_rows, added, 0.0)


def selects(pattern: str, name: str) -> bool:
    """Return whether ``--lora-target-modules`` or ``--lora-exclude-modules`` with ``pattern``
    selects a module.

    A pattern is the last part of the module's name (``q_proj``, ``self_attn.q_proj``), or a regular
    expression for the whole name (``model.layers.[0-3].mlp.*``).
    """
    return (
        name == pattern or name.endswith(f".{pattern}") or re.fullmatch(pattern, name) is not None
    )


def add_lora(
    model: nn.Module,
    layers: Sequence[nn.Module],
    settings: LoraSettings,
    seed_of: Callable[[str], int],
) -> dict[str, LoraLinear]:
    """Freeze the model, and add adapters to the selected linear layers.

    Args:
        layers: The decoder layers. Only linear layers inside them can have adapters.
        seed_of: Returns the seed for the initial values of the layer with this name.

    Returns:
        The layers with adapters by name, in the order of the model.

    Raises:
        ModelError: A pattern selects no linear layer of a decoder layer, or no layer is left.
    """
    inside = {id(module) for layer in layers for module in layer.modules()}
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, CpuLinear) and id(module) in inside
    }
    chosen = choose_layers(list(linears), settings, type(model).__name__)
    model.requires_grad_(False)
    for name in chosen:
        _add(linears[name], settings, seed_of(name))
    return lora_layers(model)


def choose_layers(linears: Sequence[str], settings: LoraSettings, model: str) -> list[str]:
    """Return the names of the layers that have an adapter.

    Args:
        linears: The names of all linear layers of the decoder layers that can have one.
        model: The name of the model's class, for error messages.

    Raises:
        ModelError: A pattern selects no layer, or no layer is left.
    """
    for flag, patterns in (
        ("--lora-target-modules", settings.targets),
        ("--lora-exclude-modules", settings.exclude),
    ):
        for pattern in patterns:
            if pattern not in (ALL_LINEAR, EXPERTS) and not any(
                selects(pattern, name) for name in linears
            ):
                last = sorted({name.rpartition(".")[2] for name in linears})
                raise ModelError(
                    f"{flag} {pattern!r} selects no linear layer of the decoder layers of "
                    f"{model}, which has {', '.join(last)}. Embeddings and the head cannot have "
                    "adapters. Fused experts can have them only all together, with the name "
                    f"{EXPERTS}"
                )
    chosen = [name for name in linears if _is_chosen(name, settings)]
    if not chosen and EXPERTS not in settings.targets:
        raise ModelError("--lora-exclude-modules leaves no layer of --lora-target-modules")
    return chosen


def _is_chosen(name: str, settings: LoraSettings) -> bool:
    if any(selects(pattern, name) for pattern in settings.exclude):
        return False
    every = ALL_LINEAR in settings.targets and name.rpartition(".")[2] not in _ROUTERS
    return every or any(
        selects(pattern, name)
        for pattern in settings.targets
        if pattern not in (ALL_LINEAR, EXPERTS)
    )


def _add(module: nn.Linear, settings: LoraSettings, seed: int) -> None:
    device = module.weight.device
    factor = torch.empty(settings.rank, module.in_features, device=device)
    if device.type != "meta":
        factor.copy_(initial_factor(settings, module.in_features, seed))
    attach(module, factor, torch.zeros(module.out_features, settings.rank, device=device), settings)


def initial_factor(
    settings: LoraSettings, inputs: int, seed: int, rows: int | None = None
) -> Tensor:
    """Return the initial values of ``A``, float32 ``[rank, inputs]`` on the CPU, so that every
    device has the same.

    Args:
        rows: The number of rows, if it is not the rank.
    """
    shape = (rows or settings.rank, inputs)
    generator = torch.Generator().manual_seed(seed)
    if settings.init == "gaussian":
        return torch.randn(shape, generator=generator) / settings.rank
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(inputs)


def attach(module: nn.Linear, a: Tensor, b: Tensor, settings: LoraSettings) -> None:
    """Change a linear layer to a :class:`LoraLinear` with these factors."""
    module.__class__ = LoraLinear
    assert isinstance(module, LoraLinear)
    module.lora_A = nn.Parameter(a)
    module.lora_B = nn.Parameter(b)
    module.lora_scale = settings.scale
    module.lora_dropout = settings.dropout
    module.lora_on = True
    module.lora_rows = None  # the layer may have had another adapter, of only some rows


def lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Return the layers with adapters by name, in the order of the model."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)
    }


class Switched(Protocol):
    """A layer whose adapter can be switched off."""

    lora_on: bool


@contextmanager
def adapters_off(layers: Iterable[Switched]) -> Iterator[None]:
    """Let the layers compute without their adapters within the context."""
    layers = list(layers)
    for layer in layers:
        layer.lora_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.lora_on = True


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ``weight + scale * b @ a``, computed and returned in float32, or in float64 if
    ``weight`` is float64.

    Args:
        weight: ``[out, in]``, or some of its rows.
        a: ``[rank, in]``.
        b: ``[out, rank]``, or the same rows.
    """
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return weight.to(wide) + (b.to(wide) @ a.to(wide)) * scale


def shortest_targets(chosen: Sequence[str], linears: Sequence[str]) -> list[str]:
    """Return names for ``target_modules`` of an adapter's file that select exactly the layers
    ``chosen``.

    These are the last parts of the names (``q_proj``) if they select no other of the model's
    ``linears``, because engines expect them. Otherwise they are whole names.
    """
    last = {name.rpartition(".")[2] for name in chosen}
    same = {name for name in linears if name.rpartition(".")[2] in last}
    return sorted(last) if same == set(chosen) else list(chosen)
