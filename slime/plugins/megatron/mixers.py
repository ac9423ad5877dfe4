"""Layers that mix tokens otherwise than by attention to all of them, which megatron-core lacks or does
not compute over packs: latent attention to the keys that an indexer selects (DeepSeek V3.2, GLM-5),
and the gated delta net of transformers.

megatron-core has an experimental layer of its own (``experimental_attention_variant`` "dsa"), from
which comes the way in which its latent attention passes hidden states to it. Its indexer computes no
packs, only bfloat16, and squares of a whole batch. So the indexer here is that of transformers, and
blocks of queries are selected and computed by what FSDP uses, :mod:`slime.models.masked_attention`.

In a delta net, the key heads, each with its value heads, are divided among the ranks of tensor parallelism, and
once more among those of context parallelism, which have equal weights. The output projection adds
what the heads contribute. So a rank computes a smaller delta net, with its heads only and on the
tokens of all ranks, and the outputs are summed over ranks.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from slime.models.layer_kinds import GATED_DELTA_NET
from slime.models.masked_attention import select_keys
from slime.models.packed_layers import run_sequences
from slime.plugins.megatron.core import MegatronError
from slime.plugins.megatron.maps import ByHead, Layout
from slime.plugins.megatron.maps.family import Entry, Family, Settings
from slime.plugins.megatron.modules import (
    Offsets,
    Pack,
    PackedCoreAttention,
    device_of,
    gather_or_copy,
    scatter_or_reduce,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def module_class(hf_config: PretrainedConfig, *endings: str) -> type[nn.Module]:
    """Return the class of transformers for a model's modules whose names end so."""
    module = inspect.getmodule(AutoModelForCausalLM._model_mapping[type(hf_config)])
    (name,) = (name for name in vars(module) if name.endswith(endings))
    found: type[nn.Module] = getattr(module, name)
    return found


class Indexers:
    """Makes the indexers of a model, and their rotary positions.

    Attributes:
        types: For each layer "full", or "shared" if it has the selection of the last full one.
    """

    def __init__(self, hf_config: PretrainedConfig, types: Sequence[str]) -> None:
        self.hf_config = hf_config
        self.types = types

    def make(self, index: int, config: TransformerConfig) -> nn.Module | None:
        """Return the indexer of layer ``index`` without values; None for a shared layer."""
        if self.types[index] == "shared":
            return None
        cls: Any = module_class(self.hf_config, "Indexer")
        with torch.device("meta"):
            indexer: nn.Module = cls(self.hf_config, index)
        # Nothing trains it, as in transformers.
        return indexer.to(config.params_dtype).to_empty(device=device_of(config))

    def source(self, index: int) -> int:
        """Return the layer whose selection layer ``index`` has."""
        return max(i for i in range(index + 1) if self.types[i] != "shared")

    def require_stage(self, layers: range) -> None:
        """Raise MegatronError if a stage begins with a layer whose selection another stage has."""
        if layers and self.types[layers[0]] == "shared":
            raise MegatronError(
                f"a pipeline stage begins with layer {layers[0]}, which has the selection of layer "
                f"{self.source(layers[0])} (indexer_types in config.json), and stages do not send "
                "it: choose other stages with --decoder-first-pipeline-num-layers or "
                "--pipeline-model-parallel-size"
            )

    @cached_property
    def rotary(self) -> nn.Module:
        cls: Any = module_class(self.hf_config, "RotaryEmbedding")
        made: nn.Module = cls(self.hf_config)
        return made


class SparseCoreAttention(PackedCoreAttention):
    """Attention inside each sample of a pack to what an indexer selects."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, indexers: Indexers, **given: Any
    ) -> None:
        super().__init__(config, layer_number, **given)
        self.index = layer_number - 1
        self.source = indexers.source(self.index)
        self.is_shared = "shared" in indexers.types[self.index + 1 : self.index + 2]
        self.indexer = indexers.make(self.index, config)
        self.indexers = indexers

    @torch.no_grad()
    def select(self, pack: Pack, x: Tensor | None, qr: Tensor | None) -> Tensor | None:
        """Return the selected keys, int32 ``[T, index_topk]``.

        Args:
            x: ``[T, 1, hidden]``; with sequence parallelism, the rows of this rank.
            qr: The normalized latents of the queries, ``[T, q_lora_rank]``.
        """
        selected = self._select(pack, x, qr)
        return selected if selected.shape[1] else None

    def _select(self, pack: Pack, x: Tensor | None, qr: Tensor | None) -> Tensor:
        if self.indexer is None:
            return pack.selected[self.source]
        assert x is not None and qr is not None
        assert pack.positions is not None and pack.segments is not None
        rows = [x.squeeze(1), qr]
        if self.config.sequence_parallel:
            group = mpu.get_tensor_model_parallel_group()
            rows = [gather_from_sequence_parallel_region(part, group=group) for part in rows]
        hidden, latents = (part[None] for part in rows)
        if pack.index_cos_sin is None:
            pack.index_cos_sin = self.indexers.rotary(hidden, pack.positions[None])
        selected = select_keys(
            self.indexer, self.indexer.forward, hidden, latents, pack.index_cos_sin, pack.segments
        )[0]
        if self.is_shared:  # also when backward computes the layers again
            pack.selected[self.index] = selected
        return selected


_NET = ".linear_attn."


@dataclass(frozen=True)
class DeltaNets:
    """Makes the gated delta nets of a model.

    Attributes:
        hf_config: The config of the language model.
        parameters: The entries of the parameters of a layer in the weight map, by their names in
            transformers.
    """

    hf_config: PretrainedConfig
    parameters: Mapping[str, Entry]

    def make(self, index: int, ranks: int) -> nn.Module:
        """Return the module of transformers for layer ``index``, without memory and with one of
        ``ranks`` equal parts of the heads."""
        cls: Any = module_class(self.hf_config, *GATED_DELTA_NET.mixers)
        config = copy.copy(self.hf_config)
        config.linear_num_key_heads //= ranks
        config.linear_num_value_heads //= ranks
        with torch.device("meta"):
            net: nn.Module = cls(config, index)
        return net


def delta_nets(hf_config: PretrainedConfig, family: Family, settings: Settings) -> DeltaNets | None:
    """Return what makes the gated delta nets of a model; None if it has none."""
    places = [
        index for index, linear in enumerate(settings.get("linear_attention_freq") or ()) if linear
    ]
    if not places:
        return None
    found = [entry for entry in family.layer(settings, places[0]) if _NET in entry.hf[0]]
    return DeltaNets(hf_config, {entry.hf[0].rpartition(_NET)[2]: entry for entry in found})


class PackedDeltaNet(MegatronModule):
    """A gated delta net in the place of attention. Its state is reset at each sequence of a pack.

    ``weights`` has the parameters with the heads of this tensor-parallel rank. Those that
    transformers stores as all queries, all keys and all values are stored by key head here
    (:class:`ByHead`), so that they can be divided.
    """

    net: nn.Module

    def __init__(
        self, config: TransformerConfig, layer_number: int, nets: DeltaNets, **_: object
    ) -> None:
        super().__init__(config=config)
        self.layouts = {name: entry.layout for name, entry in nets.parameters.items()}
        self.keys = {
            name: entry.megatron.rpartition(".")[2] for name, entry in nets.parameters.items()
        }
        self.tp_group = mpu.get_tensor_model_parallel_group()
        self.cp_group = mpu.get_context_parallel_group()
        make: dict[str, Any] = {"dtype": config.params_dtype, "device": device_of(config)}
        shapes = nets.make(layer_number - 1, self.tp_group.size()).named_parameters()
        self.weights = NamedWeights(
            {self.keys[name]: torch.empty(x.shape, **make) for name, x in shapes}
        )
        # The module without memory computes with the weights that it is given. It is no submodule,
        # so that its parameters are not registered.
        self.__dict__["net"] = nets.make(
            layer_number - 1, self.tp_group.size() * self.cp_group.size()
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Pack | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Return the output, ``[T, 1, H]`` like the input, and no bias."""
        assert packed_seq_params is not None and packed_seq_params.segments is not None, (
            "packs only"
        )
        weights = self.weights_of_rank()
        mixed = run_sequences(
            lambda batch, _: torch.func.functional_call(
                self.net, weights, kwargs={"hidden_states": batch}
            ),
            self._rows_of_all(hidden_states.squeeze(1)),
            packed_seq_params.segments,
        )
        return self._sum(mixed).unsqueeze(1), None

    def weights_of_rank(self) -> dict[str, Tensor]:
        """Return the weights with the heads that this rank computes, by their names in
        transformers.
        """
        held = self.weights()
        return {
            name: self.part_of_rank(held[self.keys[name]], layout)
            for name, layout in self.layouts.items()
        }

    def part_of_rank(self, weight: Tensor, layout: Layout) -> Tensor:
        """Return the part of a weight with the heads that this rank computes, in the order of
        transformers, given the part of this tensor-parallel rank."""
        size = self.cp_group.size()
        rank = self.cp_group.rank()
        if layout.axis is None:  # each rank has the gradient of its heads
            weight = copy_to_tensor_model_parallel_region(weight, group=self.tp_group)
        elif size > 1:
            weight = weight.chunk(size, layout.axis)[rank]
        if isinstance(layout, ByHead):
            here = dataclasses.replace(layout, heads=layout.heads // (self.tp_group.size() * size))
            (weight,) = here.split(weight)
        return weight

    def _rows_of_all(self, rows: Tensor) -> Tensor:
        """Return the rows of the ranks that share the heads, ``[N, H]``, given those of this rank,
        ``[T, H]``. Their gradients are summed over these ranks."""
        rows = gather_or_copy(rows, self.config.sequence_parallel, self.tp_group)
        return gather_from_sequence_parallel_region(rows, group=self.cp_group)

    def _sum(self, out: Tensor) -> Tensor:
        """Sum the outputs over the ranks that share the heads, and return the rows of this rank."""
        out = reduce_scatter_to_sequence_parallel_region(out, group=self.cp_group)
        return scatter_or_reduce(out, self.config.sequence_parallel, self.tp_group)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: object = None
    ) -> dict[str, ShardedTensor]:
        """Return the weights as parts of those of all heads."""
        axes = {
            f"weights.{self.keys[name]}": x.axis
            for name, x in self.layouts.items()
            if x.axis is not None
        }
        tensors = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(tensors, prefix, axes, sharded_offsets)


class NamedWeights(nn.Module):
    """Parameters by name, which a call returns.

    With ``--overlap-param-gather``, Megatron waits for the parameters of a module when the module
    is called.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def forward(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())
