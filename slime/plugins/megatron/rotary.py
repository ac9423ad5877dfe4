"""Rotary angles for packs, and the frequencies that transformers uses for a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from slime.plugins.megatron.modules import Pack

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class PackedRotary(nn.Module):
    """Rotary angles for each token of a pack, with the frequencies of one of megatron-core's
    embeddings.

    Megatron first calls :meth:`get_rotary_seq_len` and then :meth:`forward` with the length. Here
    the first call stores cosines and sines in the pack, for
    :class:`~slime.plugins.megatron.modules.PackedCoreAttention`. The second returns None, so that
    Megatron itself does not rotate the heads.
    """

    frequencies: Tensor

    def __init__(
        self,
        source: RotaryEmbedding,
        scaled: tuple[Tensor, float] | None = None,
        windowed: tuple[Tensor, float] | None = None,
    ) -> None:
        """Create the embedding. ``scaled`` are frequencies ``[rotary dims / 2]`` that replace those
        of ``source``, and a factor on cosines and sines; ``windowed`` are those of layers with a
        sliding window, if they differ."""
        super().__init__()
        self.windowed = None if windowed is None else PackedRotary(source, windowed)
        self.interleaved = source.rotary_interleaved
        self.scale: float | None = None
        frequencies = source.inv_freq
        if scaled is not None:
            frequencies, self.scale = scaled
        # YaRN: the angles of position 1 are its frequencies
        elif hasattr(source, "inv_freq_extra"):
            angles, scale = source.get_emb(2)
            frequencies = angles[1].flatten()[: angles.shape[-1] // 2]
            self.scale = float(scale)
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

    def get_rotary_seq_len(
        self,
        context: object,
        transformer: object,
        x: object,
        config: TransformerConfig,
        pack: Pack,
        **_: object,
    ) -> Tensor | None:
        assert pack.positions is not None
        pack.cos_sin = self.cos_sin(pack.positions, config.params_dtype)
        if self.windowed is not None:
            pack.window_cos_sin = self.windowed.cos_sin(pack.positions, config.params_dtype)
        return None

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of tokens, each ``[T, 1, rotary dims]``."""
        angles = self.angles(positions)
        scale = 1.0 if self.scale is None else self.scale
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    def forward(self, length: Tensor | None, **_: object) -> Any:
        return None

    def angles(self, positions: Tensor) -> Tensor:
        """Return the angles of tokens, float32 ``[T, 1, rotary dims]``."""
        self.frequencies = self.frequencies.to(positions.device)
        angles = torch.outer(positions.float(), self.frequencies)
        angles = (
            angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        )
        return angles.unsqueeze(1)


def scaled_frequencies(hf_config: PretrainedConfig) -> tuple[Tensor, float] | None:
    """Return the rotary frequencies that transformers uses, if config.json has YaRN or linear
    scaling.

    Where layers with a sliding window have parameters of their own, the frequencies are those of
    the other layers.

    Returns:
        float32 frequencies ``[rotary dims / 2]``, and the factor on cosines and sines; None for
        other types of scaling.
    """
    rope = getattr(hf_config, "rope_parameters", None) or {}
    layers = "full_attention" if "full_attention" in rope else None
    return _scaled_frequencies(hf_config, rope[layers] if layers else rope, layers)


def window_frequencies(hf_config: PretrainedConfig) -> tuple[Tensor, float] | None:
    """Return the same of the layers with a sliding window; None if they have the parameters of all
    layers.
    """
    rope = (getattr(hf_config, "rope_parameters", None) or {}).get("sliding_attention")
    if rope is None:
        return None
    if (scaled := _scaled_frequencies(hf_config, rope, "sliding_attention")) is not None:
        return scaled
    size = (
        getattr(hf_config, "head_dim", None)
        or hf_config.hidden_size // hf_config.num_attention_heads
    )
    size = int(size * rope.get("partial_rotary_factor", 1.0))
    return 1.0 / (rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)), 1.0


def _scaled_frequencies(
    hf_config: PretrainedConfig, rope: Mapping[str, Any], layers: str | None
) -> tuple[Tensor, float] | None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = rope.get("rope_type", "default")
    if kind not in ("yarn", "linear"):
        return None
    of = {} if layers is None else {"layer_type": layers}
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf_config, device=torch.device("cpu"), **of)
    return frequencies, float(scale)


class LatentRotary(PackedRotary):
    """The rotary embedding of latent attention, which rotates the heads itself: the "length" is the
    positions.
    """

    def get_rotary_seq_len(
        self,
        context: object,
        transformer: object,
        x: object,
        config: TransformerConfig,
        pack: Pack,
        **_: object,
    ) -> Tensor | None:
        return pack.positions

    def forward(self, length: Tensor | None, **_: object) -> Any:
        """Return the angles, float32 ``[T, 1, rotary dims]``, and with YaRN also their scale."""
        assert length is not None
        angles = self.angles(length)
        return angles if self.scale is None else (angles, self.scale)
