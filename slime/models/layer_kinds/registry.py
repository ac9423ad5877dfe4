"""All kinds of layers, and those of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from torch import nn
from transformers import PreTrainedModel

from slime.models.decoder import decoder_layers
from slime.models.layer_kinds.kind import LayerKind, Place, Sees
from slime.models.loading import ModelError
from slime.registry import find, parts


@cache
def all_kinds() -> tuple[LayerKind, ...]:
    return tuple(find("layer kind", name) for name in parts("layer kind"))


def _ending(layer: nn.Module, endings: tuple[str, ...]) -> Iterator[nn.Module]:
    return (module for module in layer.modules() if endings and type(module).__name__.endswith(endings))


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
        """The attention modules that need whole sequences, each after what bounds the keys that it sees and its
        decoder layer."""
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
    config, family = model.config.get_text_config(), type(model).__name__
    layers = decoder_layers(model)
    types = list(getattr(config, "layer_types", None) or [])[: len(layers)] or [""] * len(layers)
    found = []
    for layer, type_ in zip(layers, types, strict=True):
        place = Place(type_, layer, config)
        kinds = [kind for kind in all_kinds() if kind.is_at(place)]
        if type_ and not any(type_ in kind.types for kind in kinds):
            raise ModelError(
                f"{family} has layers of type {type_}, in modules that slime does not know, which may mix packed "
                f"samples: {instead}"
            )
        found.append((layer, kinds))
    result = ModelLayers(family, found)
    # A type that a kind explains is enough: a class of hybrid models may have checkpoints with attention only.
    if model._is_stateful and not any(result.mixers()) and not all(types):
        raise ModelError(f"{family} has recurrent layers that slime does not know: {instead}")
    return result


def freeze_untrained(model: nn.Module) -> None:
    """Freeze the indexers, which get no gradient. An optimizer would let their weights decay otherwise."""
    endings = tuple(ending for kind in all_kinds() for ending in kind.indexers)
    for module in _ending(model, endings):
        module.requires_grad_(False)
