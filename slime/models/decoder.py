"""Find the parts of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

VISION_TOWERS = ("visual", "vision_tower", "vision_model", "vision_embed_tokens")


def backbone_of(model: PreTrainedModel) -> nn.Module:
    """Return the model without its head. ``base_model`` of Llama 4 is the model with its head."""
    backbone: nn.Module = model.base_model
    if backbone is model:
        backbone = model.get_submodule("model")
    return backbone


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of the language model: the longest list of layers outside a vision tower."""
    names = set(model._no_split_modules or [])
    vision = {
        id(m) for name, tower in model.named_modules() if name.split(".")[-1] in VISION_TOWERS for m in tower.modules()
    }
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) and id(m) not in vision]
    named = [m for m in lists if type(m[0]).__name__ in names]
    return max((list(m) for m in named or lists), key=len)


@contextmanager
def one_layer_of_each_kind(model: PreTrainedModel) -> Iterator[None]:
    """Let a model have only its first decoder layers within the context: as few as contain each kind of layer.

    What is checked on them holds for all layers, and neither the memory nor the time of a large model is needed.
    """
    layers = decoder_layers(model)
    first: dict[str, int] = {}
    for number, layer in enumerate(layers):
        first.setdefault(_kind(layer), number)
    where = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and list(child) == layers
    ]
    for module, name, _ in where:
        module._modules[name] = nn.ModuleList(layers[: max(first.values()) + 1])
    try:
        yield
    finally:
        for module, name, child in where:
            module._modules[name] = child


def _kind(layer: nn.Module) -> str:
    """Return a value that is equal for layers with the same modules and settings, whatever their weights."""
    found: list[object] = []
    for module in layer.modules():
        found += [type(module).__name__, sorted(item for item in vars(module).items() if _is_setting(*item))]
    return repr(found)


def _is_setting(name: str, value: object) -> bool:
    is_place = "idx" in name or "index" in name or name in ("layer_id", "layer_number")
    return isinstance(value, bool | int | float | str | None) and not name.startswith("_") and not is_place
