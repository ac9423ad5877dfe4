"""The adapter (LoRA) of a model that megatron-core trains, with the names of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from slime.backends.trainable import (
    TrainedAdapter,
    digest_of,
    seed_of,
    stored_factors,
    weighted_sum,
)
from slime.models.lora import LoraSettings, choose_layers, initial_factor, merged, shortest_targets
from slime.models.peft_files import Factors
from slime.plugins.megatron.experts import GroupedExperts
from slime.plugins.megatron.lora_experts import (
    ExpertPair,
    LoraExperts,
    attach_experts,
    expert_weights,
)
from slime.plugins.megatron.lora_layers import (
    FACTOR_A,
    FACTOR_B,
    WEIGHT,
    FactorPair,
    LoraLayer,
    Projection,
    attach,
    attach_delta_net,
    factors_of,
)
from slime.plugins.megatron.maps import QueryKeyValue
from slime.plugins.megatron.maps.family import COLUMNS, REPLICATED, Entry, projection_layouts
from slime.plugins.megatron.mixers import PackedDeltaNet
from slime.plugins.megatron.model import PolicyModel
from slime.plugins.megatron.weights import Held, ModelWeights, gather, global_name, who_holds

Shapes = tuple[tuple[int, int], tuple[int, int]]
"""Those of the factors A and B of a layer."""
_IN_DELTA_NET = r"self_attention\.weights\.(in_proj_\w+|out_proj)"
_LINEAR = re.compile(
    rf"^decoder\.layers\.\d+\.(.*\.linear_(qkv|proj|fc1|fc2)\.weight|{_IN_DELTA_NET})$"
)


class ModelAdapters:
    """The adapters on the linear layers of a model, and on its routed experts if the flags name
    them.

    Attributes:
        names: The layers with an adapter, as transformers names them, in the order of the model;
            also those of other pipeline stages. Those of experts come after all others.
        linears: The names of all layers that could have one.
        layers: The layers with adapters on this rank.
    """

    def __init__(
        self,
        chunks: Sequence[PolicyModel],
        weights: ModelWeights,
        settings: LoraSettings,
        seed: int,
        load: str | None,
    ) -> None:
        """Freeze the model except the head of a critic, and add adapters, with the values of PEFT's
        files in the folder ``load``, if it has any. This is a collective operation.

        Raises:
            ModelError: The flags select no layer, or the adapter in ``load`` has other layers or
                shapes.
            MegatronError: The layout cannot divide the adapter.
        """
        self.settings = settings
        self._seed = seed
        # Which layers get adapters: the linear layers that the flags select, and the routed experts
        # if they are named.
        entries = [
            e for e in weights.entries.values() if _LINEAR.match(e.megatron) and not e.experts
        ]
        self.linears = [name for entry in entries for name in _modules(entry)]
        chosen = choose_layers(self.linears, settings, type(chunks[0]).__name__)
        self.experts = {
            x.source.megatron: x for x in expert_weights(weights.entries.values(), settings)
        }
        of_experts = [name for x in self.experts.values() for name in x.all_names()]
        self.linears += of_experts
        self.names = chosen + of_experts
        self._chosen = frozenset(chosen)
        # By the shapes of whole factors, stored ones are checked before anything is frozen.
        self.shapes = self._all_shapes(entries, weights.held)
        self._stored = stored_factors(load, self.shapes)
        # Everything but the head of a critic is frozen. Then each layer becomes one with factors of
        # its own.
        for chunk in chunks:
            chunk.requires_grad_(False)
        for tensor in weights.own.values():
            tensor.requires_grad_(True)
        adapted = [layer for chunk in chunks for layer in self._adapt(chunk, weights)]
        self.layers: list[LoraLayer | LoraExperts] = [
            *adapted,
            *(x for c in chunks for x in self._adapt_experts(c)),
        ]
        self._stored = None
        # Factors have entries like weights, so that gathering, snapshots and merging need no second
        # mechanism.
        found = [(entry, factor) for chunk in chunks for factor, entry in factors_of(chunk)]
        self.local: dict[str, Tensor] = {entry.megatron: factor for entry, factor in found}
        self.entries = {
            entry.megatron: entry for source in entries for entry in self._factor_entries(source)
        }
        self.entries |= {
            entry.megatron: entry for x in self.experts.values() for entry in x.entries()
        }
        self.held = who_holds(self.local)

    def _all_shapes(self, entries: Sequence[Entry], held: dict[str, Held]) -> dict[str, Shapes]:
        """Return the shapes of the whole factors by the names of their layers."""
        shapes = {
            name: both
            for entry in entries
            for name, both in self._shapes(entry, held)
            if name in self._chosen
        }
        for megatron, x in self.experts.items():
            both = x.shapes(held[megatron].shape, self.settings.rank)
            shapes |= dict.fromkeys(x.all_names(), both)
        return shapes

    def _shapes(self, entry: Entry, held: dict[str, Held]) -> Iterator[tuple[str, Shapes]]:
        """Yield the names of the projections in a weight, and the shapes of the whole factors."""
        tp = mpu.get_tensor_model_parallel_world_size()
        rank = self.settings.rank
        rows, columns = held[entry.megatron].shape
        is_row = entry.layout == COLUMNS
        for name, count in zip(_modules(entry), _rows(entry, rows), strict=True):
            yield (
                name,
                (
                    (rank, columns * tp if is_row else columns),
                    (count if is_row else count * tp, rank),
                ),
            )

    def _factor_entries(self, entry: Entry) -> Iterator[Entry]:
        """Yield the entries of the factors of all projections in a weight that have an adapter."""
        is_row = entry.layout == COLUMNS
        a, of_rows = (COLUMNS, [REPLICATED]) if is_row else (REPLICATED, projection_layouts(entry))
        for name, b in zip(_modules(entry), of_rows, strict=True):
            if name in self._chosen:
                yield Entry(name + FACTOR_A, (name + FACTOR_A,), a)
                yield Entry(name + FACTOR_B, (name + FACTOR_B,), b)

    def _adapt(self, chunk: PolicyModel, weights: ModelWeights) -> Iterator[LoraLayer]:
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for local_name, module in chunk.named_modules():
            if isinstance(module, PackedDeltaNet):
                inside = f"{global_name(local_name, numbers)}.weights."
                held = {inside + key: weight for key, weight in module.weights.named_parameters()}
                pairs = {
                    k: x
                    for key, weight in held.items()
                    for k, x in self._pairs(weights.entries[key], weight)
                }
                if pairs:
                    yield attach_delta_net(module, pairs, self.settings.scale)
            if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
                continue
            entry = weights.entries.get(global_name(local_name, numbers) + WEIGHT)
            if entry is not None and (pairs := dict(self._pairs(entry, module.weight))):
                last = [name.rpartition(".")[2] for name in _modules(entry)]
                projections = tuple(map(Projection, last, _rows(entry, module.weight.shape[0])))
                yield attach(module, pairs, self.settings.scale, projections, _groups(entry))

    def _pairs(self, entry: Entry, weight: Tensor) -> Iterator[tuple[str, FactorPair]]:
        """Yield the factors of the projections in a weight that have an adapter, by the last parts
        of their names.
        """
        if not _LINEAR.match(entry.megatron):
            return
        factors = list(self._factor_entries(entry))
        for a, b in zip(factors[::2], factors[1::2], strict=True):
            name = a.megatron.removesuffix(FACTOR_A)
            yield name.rpartition(".")[2], FactorPair(*self._values(name, (a, b), weight), (a, b))

    def _adapt_experts(self, chunk: PolicyModel) -> Iterator[LoraExperts]:
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for local_name, module in chunk.named_modules() if self.experts else ():
            if not isinstance(module, GroupedExperts):
                continue
            pairs = {}
            for kind, weight in (("gate_up", module.gate_up), ("down", module.down)):
                x = self.experts[f"{global_name(local_name, numbers)}.{kind}"]
                values = x.values(self.settings, self._seed, tuple(weight.shape), self._stored)
                a, b = (value.to(weight, copy=True).contiguous() for value in values)
                pairs[kind] = ExpertPair(a, b, x.entries())
            yield attach_experts(module, pairs, self.settings.scale)

    def _values(
        self, name: str, entries: tuple[Entry, Entry], like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's parts of the factors of a projection."""
        (_, inputs), b = self.shapes[name]
        if self._stored is not None:
            whole: tuple[Tensor, Tensor] = self._stored[name]
        else:
            whole = initial_factor(self.settings, inputs, seed_of(self._seed, name)), torch.zeros(b)
        group = mpu.get_tensor_model_parallel_group()
        mine = [
            e.layout.part([x], group.rank(), group.size())
            for e, x in zip(entries, whole, strict=True)
        ]
        made = [x.reshape(-1, x.shape[-1]).to(like, copy=True).contiguous() for x in mine]
        return made[0], made[1]

    @torch.no_grad()
    def whole(self) -> dict[str, Factors]:
        """Return the whole factors by the names of their layers. This is a collective operation."""
        found = dict(gather(self.entries, self.local, self.held))
        factors = {
            name: Factors(found[name + FACTOR_A], found[name + FACTOR_B])
            for name in self.names
            if name in self._chosen
        }
        for x in self.experts.values():
            factors.update(x.factors(found))
        return factors

    def merge(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights with the names of the checkpoint, with the adapters added. This is a
        collective operation."""
        factors = self.whole()
        for name, weight in weights:
            pair = factors.get(name.removesuffix(WEIGHT))
            yield (
                name,
                weight
                if pair is None
                else merged(weight, *pair, self.settings.scale).to(weight.dtype),
            )


class MegatronAdapter(TrainedAdapter):
    """An adapter whose factors are divided among tensor-parallel ranks, and its layers among
    pipeline stages.
    """

    def __init__(self, base_path: str, adapters: ModelAdapters, weights: ModelWeights) -> None:
        super().__init__(
            base_path, adapters.settings, [*weights.tensors(), *sorted(adapters.local.items())]
        )
        self.adapters = adapters
        self._weights = weights

    def switches(self) -> list[LoraLayer | LoraExperts]:
        """See :meth:`TrainedAdapter.switches`."""
        return self.adapters.layers

    def layer_names(self) -> list[str]:
        """See :meth:`TrainedAdapter.layer_names`."""
        return self.adapters.names

    def factors(self) -> dict[str, Factors]:
        """See :meth:`TrainedAdapter.factors`."""
        return self.adapters.whole()

    def targets(self) -> list[str]:
        """See :meth:`TrainedAdapter.targets`."""
        return shortest_targets(self.adapters.names, self.adapters.linears)

    def digests(self) -> dict[str, str]:
        """See :meth:`TrainedAdapter.digests`."""
        sums: dict[torch.dtype, list[tuple[str, Tensor]]] = {torch.bfloat16: [], torch.float32: []}
        wide = True
        for name, tensor in self._weights.gather():
            wide = wide and tensor.dtype == torch.float32
            for dtype, found in sums.items():
                found.append((name, weighted_sum(tensor.reshape(-1), 0, dtype)))
        if not wide:
            del sums[torch.float32]
        return {
            str(dtype).removeprefix("torch."): digest_of(
                (name, int(value)) for name, value in found
            )
            for dtype, found in sums.items()
        }


def _modules(entry: Entry) -> list[str]:
    """Return the names of the linear layers of transformers in a weight."""
    return [name.removesuffix(WEIGHT) for name in entry.hf]


def _rows(entry: Entry, rows: int) -> list[int]:
    """Divide the number of rows of a weight, or of this rank's part of it, among its
    projections.
    """
    if isinstance(entry.layout, QueryKeyValue):
        sizes = entry.layout.sizes
        return [rows * size // sum(sizes) for size in sizes]
    return [rows // len(entry.hf)] * len(entry.hf)


def _groups(entry: Entry) -> int:
    """Return the number of blocks on this rank in which the rows of projections alternate."""
    if not isinstance(entry.layout, QueryKeyValue):
        return 1
    return entry.layout.groups // mpu.get_tensor_model_parallel_world_size()
