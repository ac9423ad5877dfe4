"""The sizes of a model from its config.json: parameters by kind, and the bytes that training and generation keep."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from slime.config.hf_config import read_config
from slime.data.balance import ModelShape, forward_flops
from slime.plugins.tools.plan.checkpoint_size import count_parameters

_WITH_CACHE = ("attention", "full_attention", "sliding_attention", "chunked_attention", "indexed_attention")


@dataclass(frozen=True)
class PlannedModel:
    """A model as the planner sees it.

    Attributes:
        tied: Whether the LM head is the embedding.
        stored: Parameters in the headers of the checkpoint's files; 0 if only config.json is there.
        others: Kinds of layers that are no attention and keep no KV cache, by their names in config.json.
        cached_layers: Layers with a KV cache; None for all.
    """

    shape: ModelShape
    tied: bool
    stored: int = 0
    others: tuple[str, ...] = ()
    cached_layers: int | None = None

    @classmethod
    def from_checkpoint(cls, checkpoint: str | None) -> PlannedModel | None:
        """Read config.json, and headers of weights where they are.

        None if config.json is not on this machine, or if layers, hidden size or vocabulary are not in it.
        """
        config = read_config(checkpoint) if checkpoint else None
        if config is None:
            return None
        kinds = config.get("layer_types") or config.get("layers_block_type")
        kinds = [str(kind) for kind in kinds] if isinstance(kinds, list) else []
        if kinds and not config.get("num_hidden_layers"):
            config = config | {"num_hidden_layers": len(kinds)}
        shape = ModelShape.from_config(config)
        if shape is None or not shape.vocab:
            return None
        others = tuple(sorted({kind for kind in kinds if kind not in _WITH_CACHE}))
        cached = sum(kind in _WITH_CACHE for kind in kinds) if others else None
        stored = count_parameters(checkpoint)
        return cls(shape, bool(config.get("tie_word_embeddings", False)), stored, others, cached)

    @property
    def matrices(self) -> int:
        return 3 if self.shape.gated else 2

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, which is also their number in an LM head of its own."""
        return self.shape.vocab * self.shape.hidden

    @property
    def head_and_embedding(self) -> int:
        return self.embedding * (1 if self.tied else 2)

    @cached_property
    def active(self) -> int:
        """Parameters that multiply a token in all layers, without embedding and LM head.

        They follow from the FLOPs of one token: 2 per parameter, besides those of attention.
        """
        attention = self.shape.layers * self.shape.heads * (self.shape.key_width + self.shape.value_width)
        return int((forward_flops(self.shape, 1) - attention) / 2) - self.embedding

    @property
    def experts(self) -> int:
        """Parameters of all routed experts."""
        s = self.shape
        return s.sparse_layers * s.experts * self.matrices * s.hidden * s.expert_width

    @property
    def active_experts(self) -> int:
        """Parameters of the routed experts that multiply a token."""
        s = self.shape
        return s.sparse_layers * s.experts_per_token * self.matrices * s.hidden * s.expert_width if s.experts else 0

    @property
    def dense_layers(self) -> int:
        """Parameters of all layers except routed experts: attention, routers, dense and shared MLPs, norms.

        Where the files say how many parameters there are, these are what the other parts leave.
        """
        if self.stored:
            return max(self.stored - self.experts - self.head_and_embedding, 0)
        return self.active - self.active_experts + 2 * self.shape.layers * self.shape.hidden

    @property
    def parameters(self) -> int:
        return self.dense_layers + self.experts + self.head_and_embedding

    @property
    def kept_width(self) -> float:
        """Elements per token that a layer keeps for its backward pass, the mean over layers.

        Needed even if everything that can be fused is fused: the layer's input, queries, keys and values, queries and
        keys after norm and rotation, the output of attention, the middle of the layer, and gate and up. In addition,
        measured: the outputs of the two norms and a second copy of queries, keys and values.
        """
        s = self.shape
        q, kv = s.heads * s.key_width, s.kv_heads * s.key_width
        dense, sparse = s.ffn, s.experts_per_token * s.expert_width + s.shared_expert_width
        middle = (dense * (s.layers - s.sparse_layers) + sparse * s.sparse_layers) / s.layers
        needed = s.hidden + (q + 2 * kv) + (q + kv) + q + s.hidden + (self.matrices - 1) * middle
        return needed + 2 * s.hidden + (q + 2 * kv)

    def cache_bytes_per_token(self, width: int = 2) -> int:
        """Bytes of the KV cache per token, with ``width`` bytes per element."""
        s, layers = self.shape, self.shape.layers if self.cached_layers is None else self.cached_layers
        if s.kv_rank is not None:
            return layers * (s.kv_rank + s.rope_width) * width
        return layers * s.kv_heads * (s.key_width + s.value_width) * width
