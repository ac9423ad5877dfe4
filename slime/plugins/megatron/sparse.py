"""Latent attention to the keys that an indexer selects (DeepSeek V3.2, GLM-5).

megatron-core has an experimental layer of its own (``experimental_attention_variant`` "dsa"), from
which comes the way in which its latent attention passes hidden states to it. Its indexer computes no
packs, only bfloat16, and squares of a whole batch. So the indexer here is that of transformers, and
blocks of queries are selected and computed by what FSDP uses, :mod:`slime.models.masked_attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from slime.models.masked_attention import select_keys
from slime.plugins.megatron.core import MegatronError
from slime.plugins.megatron.modules import Pack, PackedCoreAttention, device_of

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
