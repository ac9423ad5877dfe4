"""What Megatron's flags say of sizes: the parallel layout of its ranks, and the shape of the model
(MODEL_ARGS, which every backend accepts) compared with its config.json.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime.config.hf_config import SHAPE, lookup_dimension, model_config
from slime.config.layout import ParallelLayout

if TYPE_CHECKING:
    from slime.config.args import Args


def shape_problems(given: Mapping[str, Any], checkpoint: str | None) -> list[str]:
    """Report every difference between the shape flags and config.json."""
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
    return [
        f"{difference}: use the model script of this checkpoint, or leave the flag out"
        for difference in differences + _tied(given, checkpoint, config)
    ]


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


def layout_of(args: Args) -> ParallelLayout:
    """Return the layout of ``args.world_size`` ranks."""
    given = args.megatron

    def size(name: str, default: int = 1) -> int:
        return int(given.get(name) or default)

    tp = size("tensor_model_parallel_size")
    pp = size("pipeline_model_parallel_size")
    vpp = _model_chunks(given, pp, args.hf_checkpoint)
    return ParallelLayout(
        world_size=args.world_size,
        tp=tp,
        pp=pp,
        cp=size("context_parallel_size"),
        ep=size("expert_model_parallel_size"),
        etp=size("expert_tensor_parallel_size", default=tp),
        vpp=vpp,
        vpp_group=size("microbatch_group_size_per_vp_stage", default=pp) if vpp > 1 else 1,
    )


def _model_chunks(given: Mapping[str, Any], pp: int, checkpoint: str | None) -> int:
    for name in ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"):
        if given.get(name):
            return int(given[name])
    if stages := given.get("pipeline_model_parallel_layout"):
        return max(_count_stages(str(stages)) // pp, 1)
    per_chunk = given.get("num_layers_per_virtual_pipeline_stage")
    layers = _layers_to_divide(given, checkpoint) if per_chunk else 0
    return max(layers // (pp * int(per_chunk)), 1) if per_chunk and layers else 1


def _layers_to_divide(given: Mapping[str, Any], checkpoint: str | None) -> int:
    """Return the number of layers that the stages divide, 0 if it is not known."""
    layers = given.get("num_layers") or lookup_dimension(model_config(checkpoint), "num_layers")[1]
    # Flags can count embedding and output as layers.
    counted = [
        bool(given.get(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss")
    ]
    return int(layers) + sum(counted) if layers else 0


def _count_stages(text: str) -> int:
    """Return the number of stages that ``--pipeline-model-parallel-layout`` describes, as in
    ``Et*3|(tt|)*29,m|L``.
    """
    return (
        re.sub(r"\(([^)]+)\)\*(\d+)", lambda found: found[1] * int(found[2]), text).count("|") + 1
    )


def chunk_problems(given: Mapping[str, Any], checkpoint: str | None) -> list[str]:
    """Return why the layers cannot be divided into chunks; nothing if they can."""
    pp = given.get("pipeline_model_parallel_size") or 1
    per_chunk = given.get("num_layers_per_virtual_pipeline_stage")
    layers = _layers_to_divide(given, checkpoint) if per_chunk else 0
    # Megatron would round, and train with another number of chunks than the user asked for.
    if not per_chunk or layers % (pp * per_chunk) == 0:
        return []
    return [
        f"--num-layers-per-virtual-pipeline-stage {per_chunk} x "
        f"--pipeline-model-parallel-size {pp} does not divide the {layers} layers: use another "
        "number, or --num-virtual-stages-per-pipeline-rank"
    ]
