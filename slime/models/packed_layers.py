"""Prepare a model for packs: refuse layers that would be wrong, and give some modules whole
sequences.

A layer with a state (a gated delta net, a short convolution, Mamba-2) passes it from token to token
of its row, and a pack is one row with many samples. So such a module is run on a batch of whole
sequences instead, which are gathered from the pack and padded at their ends. It starts without a
state at each of them, and no token sees the padding after it. This is exact for every causal
module, with the kernels that it has. Sequences of similar length form a batch, so at most
:data:`slime.models.segments.MAX_PADDING_SHARE` of it is padding.

The attention of Llama 4 counts chunks and scales queries by the index of a row. In a pack this would
mix samples. So such a module is run on batches of whole sequences in the same way, with the SDPA of
transformers, the rotary embeddings and a mask of these sequences. Memory and time grow with the
square of a sequence's length. Attention with an indexer: :mod:`slime.models.masked_attention`.

With context parallelism, each rank gathers the rows of all ranks, computes the sequences that are
dealt to it, and gives the outputs back to the ranks of the rows. With Ulysses, ranks divide the heads
of the modules with a state instead, where they can (:mod:`slime.models.divided_mixers`).
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slime.models.divided_mixers import Shares, can_divide, run_by_heads
from slime.models.layer_kinds import Sees, layers_of
from slime.models.loading import ModelError
from slime.models.masked_attention import select_in_blocks
from slime.models.segments import PackSegments, SequenceBlock

_KNOWN = (
    "position_embeddings",
    "position_ids",
    "attention_mask",
    "past_key_values",
    "use_cache",
    "slime_pack",
)


Rotary = Tensor | tuple[Tensor, ...]
Outputs = tuple[Any, ...]
Attention = Callable[..., Outputs]


def run_attention(
    plain: Attention,
    module: nn.Module,
    sees: Sequence[Sees],
    rows: Tensor,
    pack: PackSegments,
    kwargs: Mapping[str, object],
) -> Outputs:
    """Run an attention module on the sequences of a pack, which must be listed there.

    Args:
        plain: The forward of the module.
        sees: What bounds the keys of a query besides causality.
        rows: ``[T, H]``, the hidden states of the pack; with context parallelism, those of this
            rank.
        kwargs: The arguments that the decoder layer passes.

    Returns:
        The outputs of the module: ``[1, T, H]``, and None for its weights.

    Raises:
        ModelError: The layer passes a tensor whose meaning for a sequence is not known.
    """
    for name, value in kwargs.items():
        if (name not in _KNOWN and isinstance(value, Tensor)) or (
            name == "attention_mask" and value is not None
        ):
            raise ModelError(
                f"{type(module).__name__} gets {name!r}, which slime cannot divide among the "
                "sequences of a pack: use --attn-implementation sdpa"
            )
    rotary = _rotary_of_all(cast(Rotary, kwargs["position_embeddings"]), pack)

    def attend(batch: Tensor, block: SequenceBlock) -> Tensor:
        outputs = plain(
            hidden_states=batch,
            position_embeddings=_of_block(rotary, block),
            position_ids=torch.arange(block.length, device=rows.device).expand(block.n, -1),
            attention_mask=_mask(module, sees, block, rows.device),
        )
        return cast(Tensor, outputs[0])

    return _run_on_rows_of_all(attend, rows, pack), None


def use_sdpa(module: nn.Module) -> None:
    """Let a module compute its attention with SDPA, whatever the rest of the model does."""
    config: Any = copy.deepcopy(module.config)
    config._attn_implementation = "sdpa"
    module.config = config


def _rotary_of_all(rotary: Rotary, pack: PackSegments) -> Rotary:
    """Return the rotary embeddings ``[1, T, d]`` of the rows of all context-parallel ranks."""
    if isinstance(rotary, tuple):
        return tuple(cast(Tensor, _rotary_of_all(part, pack)) for part in rotary)
    if rotary.is_complex():  # which NCCL does not send
        return torch.view_as_complex(pack.rows_of_all(torch.view_as_real(rotary)[0])).unsqueeze(0)
    return pack.rows_of_all(rotary[0]).unsqueeze(0)


def _of_block(rotary: Rotary, block: SequenceBlock) -> object:
    """Return the rotary embeddings ``[1, T, d]`` of a pack for the positions of a block, ``[n,
    length, d]``.

    All sequences begin at position 0, so those of the longest one, which is the first, are right
    for all.
    """
    if isinstance(rotary, tuple):
        return tuple(_of_block(part, block) for part in rotary)
    return rotary[0].index_select(0, block.rows[: block.length]).expand(block.n, -1, -1)


def _mask(
    module: nn.Module, sees: Sequence[Sees], block: SequenceBlock, device: torch.device
) -> Tensor:
    """Return a bool mask ``[n, 1, length, length]``, True where a query (third axis) attends to a
    key.
    """
    positions = torch.arange(block.length, device=device)
    query = positions[:, None]
    key = positions[None, :]
    mask = key <= query
    for bound in sees:
        mask = mask & bound(module.config, query, key)  # type: ignore[arg-type]
    return mask.expand(block.n, 1, -1, -1)


PADDED = "use --attn-implementation sdpa"
_PACK = "slime_pack"


def prepare_packing(model: PreTrainedModel) -> bool:
    """Let the layers of a model compute packs.

    Returns:
        Whether the packs of this model must list their sequences.

    Raises:
        ModelError: The model has layers that cannot be packed. The message names them and the flag
            to set.
    """
    layers = layers_of(model, PADDED)
    mixers = list(layers.mixers())
    # The indexer may be that of another layer.
    indexed = [layer for layer, kinds in layers.layers if any(kind.indexers for kind in kinds)]
    whole = [found for found in layers.whole_attentions() if found[1] not in indexed]
    if not (model._supports_attention_backend or mixers):
        raise ModelError(
            f"{type(model).__name__} does not support the AttentionInterface of transformers: "
            "use --attn-implementation sdpa or eager"
        )
    for kind, layer, mixer in mixers:
        layer.register_forward_pre_hook(_remember_pack(mixer), with_kwargs=True)
        # Not torch.compile, which would compile it again for each number of batches.
        mixer.forward = torch.compiler.disable(
            types.MethodType(_per_sequence(mixer.forward, kind.shares), mixer)
        )
    for _, layer, attention in layers.whole_attentions():
        if layer in indexed:
            select_in_blocks(attention)
    for sees, layer, attention in whole:
        use_sdpa(attention)
        layer.register_forward_pre_hook(_remember_pack(attention), with_kwargs=True)
        attention.forward = torch.compiler.disable(
            types.MethodType(_attention_per_sequence(attention.forward, sees), attention)
        )
    return bool(mixers or whole)


def _remember_pack(mixer: nn.Module) -> Callable[..., None]:
    """Return a hook of the decoder layer. Not all layers pass the pack on to their mixer. When
    backward recomputes a layer, its hooks run again with the arguments of that time."""

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mixer.__dict__[_PACK] = kwargs.get(_PACK)

    return hook


def _per_sequence(plain: Callable[..., Tensor], shares: Shares | None) -> Callable[..., Tensor]:
    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        pack: PackSegments | None = self.__dict__.get(_PACK)
        if pack is None:
            return plain(hidden_states, *args, **kwargs)
        if shares is not None and can_divide(self, shares, pack):
            return run_by_heads(self, shares, hidden_states[0], pack).unsqueeze(0)
        return _run_on_rows_of_all(
            lambda batch, _: plain(hidden_states=batch), hidden_states[0], pack
        )

    return forward


def _attention_per_sequence(plain: Attention, sees: list[Sees]) -> Attention:
    def forward(self: nn.Module, hidden_states: Tensor, **kwargs: object) -> Outputs:
        pack: PackSegments | None = self.__dict__.get(_PACK)
        if pack is None:
            return plain(hidden_states=hidden_states, **kwargs)
        return run_attention(plain, self, sees, hidden_states[0], pack, kwargs)

    return forward


def run_sequences(
    mixer: Callable[[Tensor, SequenceBlock], Tensor], rows: Tensor, pack: PackSegments
) -> Tensor:
    """Run a module on the sequences of a pack, which must be listed there.

    Args:
        mixer: A causal function of whole sequences, ``[n, L, H]``, which are those of a block.
        rows: ``[T, H]``, the rows of the pack.

    Returns:
        ``[T, H]``, with 0 for rows that belong to no sequence.
    """
    out = torch.zeros_like(rows)
    for block in pack.sequences:
        result = mixer(block.gather(rows), block)
        out = out.index_copy(0, block.own, result.flatten(0, 1).index_select(0, block.picks))
    return out


def _run_on_rows_of_all(
    mixer: Callable[[Tensor, SequenceBlock], Tensor], rows: Tensor, pack: PackSegments
) -> Tensor:
    """Do the same with the rows of all context-parallel ranks: ``[T, H]`` of this rank -> ``[1, T,
    H]``.
    """
    return pack.own_rows(run_sequences(mixer, pack.rows_of_all(rows), pack)).unsqueeze(0)
