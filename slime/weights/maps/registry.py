"""Find a model's family."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from slime.weights.maps.family import Family

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "glm4", "glm4_moe", "deepseek_v3")
"""One module each; ``FAMILY`` in it."""


def get_family(model_type: str) -> Family:
    """The family of a ``model_type`` (or of a ``--model-name``).

    Raises:
        ValueError: there is no map; lists those that exist.
    """
    for name in FAMILIES:
        family: Family = importlib.import_module(f"slime.weights.maps.{name}").FAMILY
        if model_type == family.name or model_type in family.model_types:
            return family
    raise ValueError(
        f"no Hugging Face ↔ Megatron map for model type {model_type!r}; there are {', '.join(FAMILIES)}: "
        "use --train-backend fsdp, or give --model-name of a family that it is built like"
    )


def family_of(config: PretrainedConfig, model_name: str | None = None) -> Family:
    """From transformers' config object; ``model_name`` (``--model-name``) overrides its type."""
    return get_family(model_name or config.model_type)
