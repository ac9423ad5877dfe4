"""Find the family of a model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from slime.weights.maps.family import Family

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "glm4", "glm4_moe", "deepseek_v3")
"""The modules of the families. Each has an attribute ``FAMILY``."""


def get_family(model_type: str) -> Family:
    """Return the family of a ``model_type`` or a ``--model-name``.

    Raises:
        ValueError: There is no map for it. The error lists the families.
    """
    for name in FAMILIES:
        family: Family = importlib.import_module(f"slime.weights.maps.{name}").FAMILY
        if model_type == family.name or model_type in family.model_types:
            return family
    raise ValueError(
        f"there is no Megatron map for the model type {model_type!r}, only for {', '.join(FAMILIES)}: "
        "use --train-backend fsdp, or give --model-name of a family with the same architecture"
    )


def family_of(config: PretrainedConfig, model_name: str | None = None) -> Family:
    """Return the family of a transformers config. ``model_name`` (``--model-name``) overrides its model type."""
    return get_family(model_name or config.model_type)
