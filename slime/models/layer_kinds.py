"""The kinds of layers that slime knows, each with what is particular to it, and those of a
model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from slime.models.divided_mixers import Shares
from slime.models.loading import ModelError, decoder_layers
from slime.registry import find, parts


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
        """Return the modules of the layer whose class names end so. transformers puts the family's
        name before it.
        """
        return list(_ending(self.layer, endings))


Sees = Callable[[PretrainedConfig, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LayerKind:
    """A way in which a layer mixes the tokens of a sequence, and what slime does with it.

    Attributes:
        name: As in docs/en/models.md.
        is_at: Whether a decoder layer is of this kind. It may be of several: a sliding window with
            attention sinks.
        types: The values of ``layer_types`` that it explains.
        mixers: For a kind with a state: the endings of the class names of the modules that have the
            state. A pack runs such a module on a batch of whole sequences
            (:mod:`slime.models.packed_layers`), and the embedded engine keeps its state in each
            slot. A module may do anything that is causal and depends only on the sequence's hidden
            states. Without mixers, the kind is a form of attention over the rows of a pack.
        sees: For attention that can only be computed for whole sequences, or with indexers, whose
            modules are the mixers: a function of the config, the position of each query ``[L, 1]`` and that of each
            key ``[1, L]`` that returns which keys before a query it may attend to, ``[L, L]``
            (:mod:`slime.models.packed_layers`).
        indexers: The endings of the class names of modules that select the keys of each query, with
            keys of their own. They get no gradient in transformers, so their weights are kept, and
            do not decay. The embedded engine keeps their keys in each slot.
        serve: Prepares one of the mixers that have a state for the embedded engine.
        shares: How ranks divide the mixers; None if they cannot.
    """

    name: str
    is_at: Callable[[Place], bool]
    types: tuple[str, ...] = ()
    mixers: tuple[str, ...] = ()
    sees: Sees | None = None
    indexers: tuple[str, ...] = ()
    serve: Callable[[nn.Module], None] = lambda mixer: None
    shares: Shares | None = None


def with_state(
    name: str,
    types: tuple[str, ...],
    mixers: tuple[str, ...],
    serve: Callable[[nn.Module], None] = lambda mixer: None,
    shares: Shares | None = None,
) -> LayerKind:
    """Return a kind whose modules have a state.

    Packing: the state starts anew at each sequence. Prompt sharing: the prompt is computed once for
    each sample, from the rows that its samples share. Context parallelism: whole sequences are
    dealt out among the ranks, or with Ulysses the heads. Engine: each slot has a state, and a
    prefix is shared only if a slot has the state at its end.
    """

    def is_at(place: Place) -> bool:
        return bool(place.modules(*mixers))

    return LayerKind(name, is_at, types, mixers, serve=serve, shares=shares)


def all_before(config: PretrainedConfig, query: Tensor, key: Tensor) -> Tensor:
    """Every token before: the mask of attention that is bounded by nothing, or by what its module
    selects.
    """
    return key <= query


def is_windowed(place: Place) -> bool:
    """Whether the layer has a window. A config without ``layer_types`` has the same one for all
    layers, or none.
    """
    if not place.type:
        return bool(getattr(place.config, "sliding_window", None))
    return place.type == "sliding_attention"


IN_THE_MASK_ONLY = ("PhimoeAttention",)
"""Classes that do not pass the window of their config to the attention: transformers has it in
their mask only.
"""


def window_of(module: nn.Module, passed: int | None) -> int | None:
    """Return how many tokens a query of an attention module sees, given what the module passes;
    None for all.
    """
    if passed is None and type(module).__name__ in IN_THE_MASK_ONLY:
        passed = module.config.sliding_window  # type: ignore[assignment, union-attr]
    return passed


SLIDING_WINDOW = LayerKind("sliding window", is_windowed, ("sliding_attention",))


# Attention to all tokens before: the kind of layer of most models.
#
# Packing: each segment attends to itself, and to the prompt that it shares. Context parallelism:
# ranks gather the keys and values (``slime/models/packed_attention.py``). Engine: a slot holds the
# keys and values.


def is_full(place: Place) -> bool:
    """Whether the layer attends to all tokens before. A config without ``layer_types`` has only one
    kind. A layer of type ``hybrid`` has another mixer beside its attention, whose kind explains the
    type."""
    return place.type in ("full_attention", "hybrid") or not (place.type or is_windowed(place))


FULL_ATTENTION = LayerKind("full attention", is_full, ("full_attention",))


# Attention sinks: the softmax of each head has one more key, with a learned score and the value 0
# (gpt-oss).
#
# transformers passes the scores to the attention as ``s_aux``. Packing, prompt sharing, context
# parallelism and engine: as the attention that has the sinks, because a sink belongs to each query.

ATTENTION_SINKS = LayerKind(
    "attention sinks",
    lambda place: any(hasattr(module, "sinks") for module in place.layer.modules()),
)


# Soft-capped attention scores (Gemma 2). transformers passes the cap to the attention as
# ``softcap``.
#
# Packing, prompt sharing, context parallelism and engine: as the attention that has the cap,
# because it changes each score alone. SDPA of transformers leaves the cap out without an error, so
# padded batches need ``--attn-implementation eager``.

SOFT_CAP = LayerKind(
    "soft cap", lambda place: bool(getattr(place.config, "attn_logit_softcapping", None))
)


# Gated delta nets with their short convolution: the linear attention of Qwen3-Next and Qwen3.5.
#
# transformers computes them, with the kernels of flash-linear-attention and causal-conv1d where
# these packages are installed. Source: Yang et al. 2024, https://arxiv.org/abs/2412.06464.

_KEYS_AND_VALUES = ("key_dim", "key_dim", "value_dim")
GATED_DELTA_NET = with_state(
    "gated delta net",
    ("linear_attention",),
    ("GatedDeltaNet",),
    shares=Shares(
        ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"),
        {"in_proj_qkv": _KEYS_AND_VALUES, "conv1d": _KEYS_AND_VALUES},
    ),
)


# Short causal convolutions between two gates (LFM2).

SHORT_CONVOLUTION = with_state(
    "short convolution", ("conv",), ("ShortConv",), shares=Shares((), {"in_proj": ("", "", "")})
)


# Mamba-2 mixers (Nemotron-H, Granite 4, Bamba; beside attention in Falcon-H1). Source: Dao and Gu
# 2024, https://arxiv.org/abs/2405.21060.


def _bound_time_steps(mixer: nn.Module) -> None:
    """Bound the time steps ``softplus(dt + bias)`` from below in decode as well, as transformers
    does in prefill and training only. Otherwise the engine's log-probs of Nemotron-H differ from
    the trainer's by 1e-3."""
    limit = getattr(mixer, "time_step_limit", (0.0, math.inf))
    if limit[0] <= 0:
        return
    smallest = math.log(math.expm1(limit[0]))  # the inverse of softplus

    def bounded(projection: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        bias = mixer.dt_bias
        assert isinstance(bias, torch.Tensor)
        rest, steps = output.split([output.shape[-1] - len(bias), len(bias)], -1)
        return torch.cat([rest, torch.maximum(steps, (smallest - bias).to(steps.dtype))], -1)

    projection = mixer.in_proj
    assert isinstance(projection, nn.Module)
    projection.register_forward_hook(bounded)


MAMBA2_MIXERS = ("Mamba2Mixer", "MambaLayer", "BambaMixer", "FalconH1Mixer")
_STATES = "n_groups * ssm_state_size"
MAMBA2 = with_state(
    "Mamba-2",
    ("linear_attention", "hybrid"),
    MAMBA2_MIXERS,
    _bound_time_steps,
    Shares(
        ("num_heads", "n_groups", "intermediate_size", "conv_dim"),
        {"in_proj": ("", "", _STATES, _STATES, "num_heads"), "conv1d": ("", _STATES, _STATES)},
        ("norm",),  # ranks cannot divide one that looks at all channels, nor one group
    ),
)


# Layers that compute each token alone, where a model lists them as layers of their own
# (Nemotron-H).

WITHOUT_MIXING = ("mlp", "moe", "dense", "sparse")
NO_MIXING = LayerKind("no mixing", lambda place: place.type in WITHOUT_MIXING, WITHOUT_MIXING)


# Attention to the tokens that an indexer selects (DeepSeek V3.2, GLM-5).
#
# Packing: blocks of queries of a segment (``slime/models/masked_attention.py``). Prompt sharing: as full
# attention. Context parallelism: each rank selects for its queries, from the indexer's keys of all
# ranks. Engine: see ``indexers``. The second name is that of transformers before 5.18.

INDEXED = ("indexed_attention", "deepseek_sparse_attention")


def has_indexer(place: Place) -> bool:
    return place.type in INDEXED or bool(place.modules("Indexer"))


SPARSE_INDEXER = LayerKind(
    "sparse indexer", has_indexer, INDEXED, ("Attention",), all_before, ("Indexer",)
)


# Two kinds of attention that depend on the whole sequence: on a mask over it, or on the index of a
# row.
#
# Packing: the attention of the layer runs on a batch of whole sequences with a mask. Prompt sharing:
# the prompt is computed once for each sample, from the rows that its samples share. Context
# parallelism: whole sequences are dealt out among the ranks. Engine: as full attention, with the
# positions in the slots; what is selected and masked depends on them only.
#
# Attention inside chunks of fixed size, counted from the first token of a sequence (Llama 4).


def is_chunked(place: Place) -> bool:
    return place.type == "chunked_attention"


def same_chunk(config: PretrainedConfig, query: Tensor, key: Tensor) -> Tensor:
    size: int = config.attention_chunk_size
    return key // size == query // size


CHUNKED_ATTENTION = LayerKind(
    "chunked attention", is_chunked, ("chunked_attention",), ("Attention",), same_chunk
)


# Queries that are scaled by the index of their row, in layers without rotary positions (Llama 4).
#
# Source: https://arxiv.org/abs/2501.19399. The index is the position only if the row is one
# sequence.


def is_tuned(place: Place) -> bool:
    modules = place.modules("Attention")
    return any(
        getattr(m, "attn_temperature_tuning", False) and not getattr(m, "use_rope", 0)
        for m in modules
    )


TEMPERATURE_TUNING = LayerKind("temperature tuning", is_tuned, (), ("Attention",), all_before)


@cache
def all_kinds() -> tuple[LayerKind, ...]:
    return tuple(find("layer kind", name) for name in parts("layer kind"))


def _ending(layer: nn.Module, endings: tuple[str, ...]) -> Iterator[nn.Module]:
    return (
        module for module in layer.modules() if endings and type(module).__name__.endswith(endings)
    )


@dataclass(frozen=True)
class ModelLayers:
    """The decoder layers of a model with their kinds."""

    family: str
    layers: list[tuple[nn.Module, list[LayerKind]]]

    @property
    def kinds(self) -> list[LayerKind]:
        """The kinds that the model has, in the order of the registry."""
        held = {kind.name for _, kinds in self.layers for kind in kinds}
        return [kind for kind in all_kinds() if kind.name in held]

    def mixers(self) -> Iterator[tuple[LayerKind, nn.Module, nn.Module]]:
        """The modules that have a state, each after its kind and its decoder layer."""
        for layer, kinds in self.layers:
            for kind in kinds:
                if not kind.sees:
                    yield from ((kind, layer, module) for module in _ending(layer, kind.mixers))

    def whole_attentions(self) -> Iterator[tuple[list[Sees], nn.Module, nn.Module]]:
        """The attention modules whose kinds have ``sees``, each after what bounds the keys that it
        sees and its decoder layer."""
        for layer, kinds in self.layers:
            sees = [kind.sees for kind in kinds if kind.sees]
            endings = {ending for kind in kinds if kind.sees for ending in kind.mixers}
            yield from ((sees, layer, module) for module in _ending(layer, tuple(endings)))

    def indexers(self) -> Iterator[nn.Module]:
        """The modules that select the keys of each query."""
        for layer, kinds in self.layers:
            for kind in kinds:
                yield from _ending(layer, kind.indexers)


def layers_of(model: PreTrainedModel, instead: str) -> ModelLayers:
    """Return the kinds of a model's decoder layers, as its config and its modules say.

    Args:
        instead: What to do if a layer is of no known kind, for the message.

    Raises:
        ModelError: The config names a type of layer that no kind explains.
    """
    config = model.config.get_text_config()
    family = type(model).__name__
    layers = decoder_layers(model)
    types = list(getattr(config, "layer_types", None) or [])[: len(layers)] or [""] * len(layers)
    found = []
    for layer, type_ in zip(layers, types, strict=True):
        place = Place(type_, layer, config)
        kinds = [kind for kind in all_kinds() if kind.is_at(place)]
        if type_ and not any(type_ in kind.types for kind in kinds):
            raise ModelError(
                f"{family} has layers of type {type_}, in modules that slime does not know, which "
                f"may mix packed samples: {instead}"
            )
        found.append((layer, kinds))
    result = ModelLayers(family, found)
    # A type that a kind explains is enough: a class of hybrid models may have checkpoints with
    # attention only.
    if model._is_stateful and not any(result.mixers()) and not all(types):
        raise ModelError(f"{family} has recurrent layers that slime does not know: {instead}")
    return result


def freeze_untrained(model: nn.Module) -> None:
    """Freeze the indexers, which get no gradient. An optimizer would let their weights decay
    otherwise.
    """
    endings = tuple(ending for kind in all_kinds() for ending in kind.indexers)
    for module in _ending(model, endings):
        module.requires_grad_(False)
