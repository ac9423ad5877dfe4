"""What slime has to know about a kind of layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PretrainedConfig


@dataclass(frozen=True)
class Place:
    """One decoder layer of a model.

    Attributes:
        type: Its entry of ``layer_types`` in the config; "" if the config has none.
        layer: The layer.
        config: The config of the language model.
    """

    type: str
    layer: nn.Module
    config: PretrainedConfig

    def modules(self, *endings: str) -> list[nn.Module]:
        """Return the modules of the layer whose class names end so. transformers puts the family's name before it."""
        return [module for module in self.layer.modules() if type(module).__name__.endswith(endings)]


Sees = Callable[[PretrainedConfig, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LayerKind:
    """A way in which a layer mixes the tokens of a sequence, and what slime does with it.

    Attributes:
        name: As in docs/en/models.md.
        is_at: Whether a decoder layer is of this kind. It may be of several: a sliding window with attention sinks.
        types: The values of ``layer_types`` that it explains.
        mixers: For a kind with a state: the endings of the class names of the modules that have the state. A pack
            runs such a module on a batch of whole sequences (:mod:`slime.models.packed_layers`), and the embedded
            engine keeps its state in each slot. A module may do anything that is causal and depends only on the
            sequence's hidden states. Without mixers, the kind is a form of attention over the rows of a pack.
        sees: For attention that can only be computed for whole sequences, whose modules are the mixers: a function of
            the config, the position of each query ``[L, 1]`` and that of each key ``[1, L]`` that returns which keys
            before a query it may attend to, ``[L, L]`` (:mod:`slime.models.whole_attention`).
        indexers: The endings of the class names of modules that select the keys of each query, with keys of their own.
            They get no gradient in transformers, so their weights are kept, and do not decay. The embedded engine
            keeps their keys in each slot.
        serve: Prepares one of the mixers that have a state for the embedded engine.
    """

    name: str
    is_at: Callable[[Place], bool]
    types: tuple[str, ...] = ()
    mixers: tuple[str, ...] = ()
    sees: Sees | None = None
    indexers: tuple[str, ...] = ()
    serve: Callable[[nn.Module], None] = lambda mixer: None


def with_state(
    name: str,
    types: tuple[str, ...],
    mixers: tuple[str, ...],
    serve: Callable[[nn.Module], None] = lambda mixer: None,
) -> LayerKind:
    """Return a kind whose modules have a state.

    Packing: the state starts anew at each sequence. Prompt sharing: the prompt is computed once for each sample, from
    the rows that its samples share. Context parallelism: whole sequences are dealt out among the ranks. Engine: each
    slot has a state, and a prefix is shared only if a slot has the state at its end.
    """
    return LayerKind(name, lambda place: bool(place.modules(*mixers)), types, mixers, serve=serve)


def all_before(config: PretrainedConfig, query: Tensor, key: Tensor) -> Tensor:
    """Every token before: the mask of attention that is bounded by nothing, or by what its module selects."""
    return key <= query


def whole_attention(
    name: str,
    is_at: Callable[[Place], bool],
    types: tuple[str, ...],
    sees: Sees = all_before,
    indexers: tuple[str, ...] = (),
) -> LayerKind:
    """Return a kind of attention that depends on the whole sequence: on a mask over it, or on the index of a row.

    Packing: the attention of the layer runs on a batch of whole sequences with a mask. Prompt sharing: the prompt is
    computed once for each sample, from the rows that its samples share. Context parallelism: whole sequences are dealt
    out among the ranks. Engine: as full attention, with the positions in the slots; what is selected and masked depends
    on them only.
    """
    return LayerKind(name, is_at, types, ("Attention",), sees, indexers)
