"""Find the parts of a Hugging Face model."""

from __future__ import annotations

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
