"""Prepare a model for packs: refuse layers that would be wrong, and give layers with a state one sequence at a time.

A layer with a state (a gated delta net, a short convolution, Mamba-2) passes it from token to token of its row, and a
pack is one row with many samples. So such a module is run on a batch of whole sequences instead, which are gathered
from the pack and padded at their ends. It starts without a state at each of them, and no token sees the padding after
it. This is exact for every causal module, with the kernels that it has. Sequences of similar length form a batch, so at
most :data:`slime.models.segments.MAX_PADDING_SHARE` of it is padding. Attention that needs whole sequences is run in
the same way (:mod:`slime.models.whole_attention`).

With context parallelism, each rank gathers the rows of all ranks, computes the sequences that are dealt to it, and
gives the outputs back to the ranks of the rows.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slime.models.layer_kinds.kind import Sees
from slime.models.layer_kinds.registry import layers_of
from slime.models.loading import ModelError
from slime.models.segments import PackSegments
from slime.models.whole_attention import Attention, Outputs, run_attention, use_sdpa

PADDED = "use --attn-implementation sdpa"
_PACK = "slime_pack"


def prepare_packing(model: PreTrainedModel) -> bool:
    """Let the layers of a model compute packs.

    Returns:
        Whether the packs of this model must list their sequences.

    Raises:
        ModelError: The model has layers that cannot be packed. The message names them and the flag to set.
    """
    layers = layers_of(model, PADDED)
    mixers, whole = list(layers.mixers()), list(layers.whole_attentions())
    if not (model._supports_attention_backend or mixers):
        raise ModelError(
            f"{type(model).__name__} does not support the AttentionInterface of transformers: "
            "use --attn-implementation sdpa or eager"
        )
    for _, layer, mixer in mixers:
        layer.register_forward_pre_hook(_remember_pack(mixer), with_kwargs=True)
        # Not torch.compile, which would compile it again for each number of batches.
        mixer.forward = torch.compiler.disable(types.MethodType(_per_sequence(mixer.forward), mixer))
    for sees, layer, attention in whole:
        use_sdpa(attention)
        layer.register_forward_pre_hook(_remember_pack(attention), with_kwargs=True)
        attention.forward = torch.compiler.disable(
            types.MethodType(_attention_per_sequence(attention.forward, sees), attention)
        )
    return bool(mixers or whole)


def _remember_pack(mixer: nn.Module) -> Callable[..., None]:
    """Return a hook of the decoder layer. Not all layers pass the pack on to their mixer. When backward recomputes a
    layer, its hooks run again with the arguments of that time."""

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mixer.__dict__[_PACK] = kwargs.get(_PACK)

    return hook


def _per_sequence(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        pack: PackSegments | None = self.__dict__.get(_PACK)
        if pack is None:
            return plain(hidden_states, *args, **kwargs)
        rows = pack.rows_of_all(hidden_states[0])
        return pack.own_rows(run_sequences(lambda batch: plain(hidden_states=batch), rows, pack)).unsqueeze(0)

    return forward


def _attention_per_sequence(plain: Attention, sees: list[Sees]) -> Attention:
    def forward(self: nn.Module, hidden_states: Tensor, **kwargs: object) -> Outputs:
        pack: PackSegments | None = self.__dict__.get(_PACK)
        if pack is None:
            return plain(hidden_states=hidden_states, **kwargs)
        return run_attention(plain, self, sees, hidden_states[0], pack, kwargs)

    return forward


def run_sequences(mixer: Callable[[Tensor], Tensor], rows: Tensor, pack: PackSegments) -> Tensor:
    """Run a module with a state on the sequences of a pack, which must be listed there.

    Args:
        mixer: A causal function of whole sequences, ``[n, L, H]``.
        rows: ``[T, H]``, the rows of the pack.

    Returns:
        ``[T, H]``, with 0 for rows that belong to no sequence.
    """
    out = torch.zeros_like(rows)
    for block in pack.sequences:
        result = mixer(block.gather(rows))
        out = out.index_copy(0, block.own, result.flatten(0, 1).index_select(0, block.picks))
    return out
