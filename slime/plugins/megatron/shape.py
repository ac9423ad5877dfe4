"""The flags of a model's shape (MODEL_ARGS), which every backend accepts, compared with its
config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime.config.files import read_yaml
from slime.config.hf_config import SHAPE, lookup_dimension, model_config

if TYPE_CHECKING:
    from slime.config.args import Args


def shape_problems(given: Mapping[str, Any], checkpoint: str | None) -> list[str]:
    """Report every difference between the shape flags and config.json."""
    return [
        f"{difference}: use the model script of this checkpoint, or leave the flag out"
        for difference in _differences(given, checkpoint)
    ]


def drop_other_model(args: Args, others: frozenset[str]) -> None:
    """Remove MODEL_ARGS that describe another model than the checkpoint that the ``--override``
    file names.

    Such a file scales a recipe to a smaller model, while the recipe's script still passes the shape
    of the larger one. Its config.json is used instead.

    Args:
        others: The flags of MODEL_ARGS besides those of the shape.
    """
    if args.override is None:
        return
    names = {str(key).replace("-", "_") for key in read_yaml(args.override, "--override")[0]}
    if "hf_checkpoint" not in names:
        return
    differences = _differences(args.megatron, args.hf_checkpoint)
    if not differences:
        return
    args.notices.append(
        "MODEL_ARGS describe another model than hf_checkpoint of the --override file "
        f"({len(differences)} differences): the config.json of this checkpoint is used instead"
    )
    for name in (*SHAPE, *others, "untie_embeddings_and_output_weights"):
        args.megatron.pop(name, None)


def _differences(given: Mapping[str, Any], checkpoint: str | None) -> list[str]:
    shape = {name: given[name] for name in SHAPE if name in given}
    config = model_config(checkpoint)
    if not config or not shape:
        return []
    # Latent attention has head sizes of its own, so the flag has no meaning.
    if config.get("kv_lora_rank"):
        shape.pop("kv_channels", None)
    differences = [
        f"--{name.replace('_', '-')} {value}, but config.json of {checkpoint} has {key} "
        f"{config_value}"
        for name, value in shape.items()
        for key, config_value in [lookup_dimension(config, name)]
        if config_value is not None and not _same(value, config_value)
    ]
    return differences + _tied(given, checkpoint, config)


def _same(flag: object, config: object) -> bool:
    if isinstance(flag, int | float) and isinstance(config, int | float):
        return math.isclose(flag, config, rel_tol=1e-9)
    return bool(flag == config)


def _tied(given: Mapping[str, Any], checkpoint: str | None, config: Mapping[str, Any]) -> list[str]:
    tied = config.get("tie_word_embeddings")
    if tied is None or "num_layers" not in given:
        return []
    untied = bool(given.get("untie_embeddings_and_output_weights", False))
    # the flag says untied and the config says tied, so equal values are a contradiction
    if untied != bool(tied):
        return []
    has = (
        "contain --untie-embeddings-and-output-weights"
        if untied
        else "lack --untie-embeddings-and-output-weights"
    )
    return [f"MODEL_ARGS {has}, but config.json of {checkpoint} has tie_word_embeddings {tied}"]
