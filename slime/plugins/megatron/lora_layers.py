"""Adapters (LoRA) on Megatron's parallel linear layers, one pair of factors for each projection of
the checkpoint.

Megatron fuses query, key and value, and gate and up, in one layer. Each of these projections has
its own ``A`` and ``B``, as in transformers. With tensor parallelism, each rank has the whole ``A``
and its rows of ``B`` of a layer that divides its outputs (column-parallel), and its columns of
``A`` and the whole ``B`` of a layer that divides its inputs (row-parallel). Ranks exchange only ``A
x``, whose number of features is the rank of the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn

from slime.models.cpu_kernels import linear
from slime.plugins.megatron.maps.family import Entry
from slime.plugins.megatron.mixers import PackedDeltaNet
from slime.plugins.megatron.modules import gather_or_copy, scatter_or_reduce

WEIGHT = ".weight"
FACTOR_A = ".lora_A"
FACTOR_B = ".lora_B"
"""Ends of the names of a layer's weight and of the factors of its adapter."""
_OWN = "lora."  # the attribute of a layer that holds its factors


class Projection(NamedTuple):
    """One projection of the checkpoint in a layer.

    Attributes:
        name: The last part of its name (``q_proj``).
        rows: The number of its output features on this rank.
    """

    name: str
    rows: int


class FactorPair(nn.Module):
    """The factors of one projection: ``lora_A [rank, in]`` and ``lora_B [out, rank]``, or this
    rank's parts of them.
    """

    def __init__(self, a: Tensor, b: Tensor, entries: tuple[Entry, Entry]) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(a)
        self.lora_B = nn.Parameter(b)
        self.entries = entries
        for factor, entry in self.by_entry():
            self.mark(factor, entry)

    def forward(self) -> FactorPair:
        """Return this pair. With ``--overlap-param-gather``, Megatron waits for its factors when it
        is called.
        """
        return self

    def mark(self, factor: nn.Parameter, entry: Entry) -> None:
        """Set the attributes by which Megatron knows on which ranks a factor is the same."""
        # the norm of all gradients counts other parameters on one rank only
        if entry.layout.axis is not None:
            set_tensor_model_parallel_attributes(factor, True, entry.layout.axis, 1)

    def by_entry(self) -> tuple[tuple[nn.Parameter, Entry], ...]:
        return (self.lora_A, self.entries[0]), (self.lora_B, self.entries[1])


class _Adapted:
    """What all layers with adapters have in common; see :class:`LoraColumn`."""

    lora: nn.ModuleDict
    lora_on: bool

    def sharded_state_dict(self, prefix: str = "", *args: Any, **more: Any) -> dict[str, Any]:
        """Return the tensors of the layer without its adapters."""
        tensors: dict[str, Any] = super().sharded_state_dict(prefix, *args, **more)  # type: ignore[misc]
        return {name: x for name, x in tensors.items() if not name.startswith(prefix + _OWN)}


class LoraColumn(_Adapted, ColumnParallelLinear):
    """A column-parallel layer with adapters. Its own weight and bias are frozen.

    Attributes:
        lora: The factors by the name of their projection.
        lora_projections: All projections of the layer, with or without an adapter.
        lora_groups: The number of blocks on this rank in which the projections' rows alternate.
        lora_scale: The factor ``s`` of ``s B A x``.
        lora_on: Whether ``forward`` adds the adapters. If not, it computes exactly what it would
            without them.
    """

    lora_projections: tuple[Projection, ...]
    lora_groups: int
    lora_scale: float

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return this rank's features of the output, ``[T, 1, out]``, and the bias that the caller
        has to add.
        """
        output, bias = super().forward(input_, weight, runtime_gather_output)
        return output + self._adapters(input_) if self.lora_on else output, bias

    def _adapters(self, x: Tensor) -> Tensor:
        pairs = _pairs(self.lora)
        inner = linear(x, torch.cat([pair.lora_A for pair in pairs.values()])) * self.lora_scale
        # Each rank computes the part of the gradient of A x that belongs to its rows of B, so
        # backward sums over ranks.
        inner = gather_or_copy(inner, self.sequence_parallel, self.tp_group)
        inner_of = dict(zip(pairs, inner.chunk(len(pairs), -1), strict=True))
        outputs = [
            linear(inner_of[name], pairs[name].lora_B)
            if name in pairs
            else inner.new_zeros(*inner.shape[:-1], rows)
            for name, rows in self.lora_projections
        ]
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat([x.unflatten(-1, (self.lora_groups, -1)) for x in outputs], -1).flatten(-2)


class LoraRow(_Adapted, RowParallelLinear):
    """A row-parallel layer with an adapter; attributes as in :class:`LoraColumn`."""

    lora_scale: float

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output, ``[T, 1, out]``, and the bias that the caller has to add."""
        output, bias = super().forward(input_)
        return output + self._adapter(input_) if self.lora_on else output, bias

    def _adapter(self, x: Tensor) -> Tensor:
        (pair,) = _pairs(self.lora).values()
        inner = linear(x, pair.lora_A) * self.lora_scale
        return linear(scatter_or_reduce(inner, self.sequence_parallel, self.tp_group), pair.lora_B)


class LoraDeltaNet(_Adapted, PackedDeltaNet):
    """A gated delta net with adapters on its linear layers; attributes as in :class:`LoraColumn`.
    The factors are divided as the weights are: each rank has, or computes with, those of its
    heads."""

    def weights_of_rank(self) -> dict[str, Tensor]:
        """Return the weights and factors with the heads that this rank computes, by their names in
        ``net``.
        """
        found = super().weights_of_rank()
        for name, pair in _pairs(self.lora).items() if self.lora_on else ():
            for end, (factor, entry) in zip((FACTOR_A, FACTOR_B), pair.by_entry(), strict=True):
                found[name + end] = self.part_of_rank(factor, entry.layout)
        return found


class _LinearOfNet(nn.Linear):
    """A linear layer of a module without memory, whose weight and factors are given to each call of
    the module. Without factors it computes what it would without an adapter."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return (
            out
            if self.lora_A.is_meta
            else out + linear(linear(x, self.lora_A) * self.lora_scale, self.lora_B)
        )


LoraLayer: TypeAlias = LoraColumn | LoraRow | LoraDeltaNet


def attach_delta_net(
    module: PackedDeltaNet, pairs: dict[str, FactorPair], scale: float
) -> LoraDeltaNet:
    """Change a gated delta net to one with adapters. ``pairs`` are the factors by the name of their
    linear layer.
    """
    module.__class__ = LoraDeltaNet
    assert isinstance(module, LoraDeltaNet)
    module.lora = nn.ModuleDict(pairs)
    module.lora_on = True
    for name in pairs:
        layer = module.net.get_submodule(name)
        layer.__class__ = _LinearOfNet
        assert isinstance(layer, _LinearOfNet)
        layer.lora_scale = scale
        layer.lora_A, layer.lora_B = (nn.Parameter(torch.empty(0, device="meta")) for _ in range(2))
    return module


def attach(
    module: ColumnParallelLinear | RowParallelLinear,
    pairs: dict[str, FactorPair],
    scale: float,
    projections: tuple[Projection, ...],
    groups: int,
) -> LoraLayer:
    """Change a linear layer to one with adapters. ``pairs`` are the factors by the name of their
    projection.
    """
    column = isinstance(module, ColumnParallelLinear)
    module.__class__ = LoraColumn if column else LoraRow
    assert isinstance(module, LoraColumn | LoraRow)
    module.lora = nn.ModuleDict(pairs)
    module.lora_scale = scale
    module.lora_on = True
    if isinstance(module, LoraColumn):
        module.lora_projections = projections
        module.lora_groups = groups
    for pair in pairs.values():
        # With sequence parallelism, the whole factor sees this rank's part of the tokens, so its
        # gradients are summed.
        whole = pair.lora_A if column else pair.lora_B
        whole.sequence_parallel = module.sequence_parallel  # type: ignore[attr-defined]
    return module


def factors_of(model: nn.Module) -> Iterator[tuple[nn.Parameter, Entry]]:
    """Yield the factors on this rank, in the order of the model."""
    for module in model.modules():
        if isinstance(module, FactorPair):
            yield from module.by_entry()


def _pairs(modules: nn.ModuleDict) -> dict[str, FactorPair]:
    return {name: pair() for name, pair in modules.items() if isinstance(pair, FactorPair)}
