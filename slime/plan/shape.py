"""The sizes of a model from its config.json: parameters by kind, and the bytes that training and generation keep."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from slime.config.hf_config import read_config
from slime.data.balance import ModelShape, forward_flops


@dataclass(frozen=True)
class PlannedModel:
    """A model as the planner sees it.

    Attributes:
        tied: Whether the LM head is the embedding.
    """

    shape: ModelShape
    tied: bool

    @classmethod
    def from_checkpoint(cls, checkpoint: str | None) -> PlannedModel | None:
        """Read config.json; None if it is not on this machine, or the size of the vocabulary is not in it."""
        shape = ModelShape.from_checkpoint(checkpoint)
        if shape is None or checkpoint is None or not shape.vocab:
            return None
        return cls(shape, bool((read_config(checkpoint) or {}).get("tie_word_embeddings", False)))

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
        """Parameters of all layers except routed experts: attention, routers, dense and shared MLPs, norms."""
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
        s = self.shape
        if s.kv_rank is not None:
            return s.layers * (s.kv_rank + s.rope_width) * width
        return s.layers * s.kv_heads * (s.key_width + s.value_width) * width
