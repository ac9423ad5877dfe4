"""Find the family of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.config.layout import ParallelLayout
from slime.registry import find, parts
from slime.weights.maps.family import Family, HfConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def get_family(model_type: str, model_name: str | None = None) -> Family:
    """Return the family of a ``model_type``.

    Args:
        model_name: ``--model-name``. If it is a family or a model type that has a map, it is used instead. Any other
            name, such as ``qwen3-4B``, has no effect on a ``model_type`` that has a map.

    Raises:
        ValueError: There is no map for it. The error lists the families.
    """
    for wanted in (model_name, model_type):
        for name in parts("model family"):
            family: Family = find("model family", name)
            if wanted is not None and (wanted == family.name or wanted in family.model_types):
                return family
    raise ValueError(
        f"there is no Megatron map for the model type {model_type!r}, only for {', '.join(parts('model family'))}: "
        "use --train-backend fsdp, or give --model-name of a family with the same architecture"
    )


def not_divided(config: HfConfig, layout: ParallelLayout) -> str | None:
    """Return why the model of a config.json cannot have a parallel layout, and what to do; None if it can."""
    heads = config.get("linear_num_key_heads")
    if not heads or heads % (layout.tp * layout.cp) == 0:
        return None
    return (
        f"--tensor-model-parallel-size {layout.tp} and --context-parallel-size {layout.cp} together divide the "
        f"{heads} key heads of gated delta nets (linear_num_key_heads in config.json): {layout.tp} · {layout.cp} must "
        f"be a divisor of {heads}"
    )


def family_of(config: PretrainedConfig, model_name: str | None = None) -> Family:
    """Return the family of a transformers config; ``model_name`` as in :func:`get_family`."""
    return get_family(config.model_type, model_name)
