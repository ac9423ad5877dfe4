"""The parallel layout of the training ranks: tensor, context, data, pipeline and expert
parallelism.

The order of ranks is Megatron's default: tensor parallel ranks are adjacent, followed by context,
data and pipeline parallel ones. FSDP uses the same order with context and data parallelism only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.config.files import read_table
from slime.config.hf_config import SHAPE, lookup_dimension, model_config
from slime.config.passthrough import by_name

if TYPE_CHECKING:
    from slime.config.args import Args


_TABLE = read_table("passed_on.json")["megatron"]
ARCHITECTURE = frozenset(_TABLE["architecture"])
"""Megatron's flags that describe the model. FSDP takes all of this from the checkpoint's code and
config.json.
"""


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel dimensions. ``vpp`` is the number of model chunks per pipeline rank."""

    world_size: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    vpp_group: int = 1
    """With interleaved pipelines, the number of micro-batches is a multiple of this."""

    @classmethod
    def from_args(cls, args: Args) -> ParallelLayout:
        """Read the layout of ``args.world_size`` ranks from the flags."""
        given = args.megatron

        def size(name: str, default: int = 1) -> int:
            return int(given.get(name) or default)

        # FSDP shards over all data-parallel ranks and has no other axis than context parallelism.
        cp = size("context_parallel_size")
        if args.train_backend != "megatron":
            return cls(world_size=args.world_size, cp=cp)
        tp = size("tensor_model_parallel_size")
        pp = size("pipeline_model_parallel_size")
        vpp = _model_chunks(given, pp, args.hf_checkpoint)
        return cls(
            world_size=args.world_size,
            tp=tp,
            pp=pp,
            cp=cp,
            ep=size("expert_model_parallel_size"),
            etp=size("expert_tensor_parallel_size", default=tp),
            vpp=vpp,
            vpp_group=size("microbatch_group_size_per_vp_stage", default=pp) if vpp > 1 else 1,
        )

    @property
    def dp(self) -> int:
        """The data-parallel size: the number of ranks (or groups of ranks) that train on different
        samples.
        """
        return max(self.world_size // (self.tp * self.pp * self.cp), 1)

    def data_rank(self, rank: int) -> int:
        """Return the data-parallel index of a rank: which share of the samples it trains on."""
        return rank // (self.tp * self.cp) % self.dp

    def schedule(self) -> dict[str, int]:
        """Return the layout arguments of ``build_dp_schedule``."""
        return {
            "dp_size": self.dp,
            "cp_size": self.cp,
            "vpp_size": self.vpp,
            "microbatch_group_size_per_vp_stage": self.vpp_group,
        }

    def problems(self) -> list[str]:
        """Report parallel sizes that do not fit each other or the number of ranks."""
        found = []
        model = self.tp * self.pp * self.cp
        if self.world_size % model:
            found.append(
                f"{self.world_size} training ranks are not a multiple of tensor {self.tp} x "
                f"pipeline {self.pp} x context {self.cp} = {model}: change "
                "--actor-num-gpus-per-node or the --*-parallel-size flags"
            )
        experts = self.ep * self.etp * self.pp
        if (self.ep > 1 or self.etp != self.tp) and self.world_size % experts:
            found.append(
                f"{self.world_size} training ranks are not a multiple of expert {self.ep} x "
                f"expert tensor {self.etp} x pipeline {self.pp} = {experts}: change "
                "--expert-model-parallel-size or --expert-tensor-parallel-size"
            )
        if self.vpp > 1 and self.pp == 1:
            found.append("interleaved pipelines need --pipeline-model-parallel-size of at least 2")
        return found


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


def check_layout(
    layout: ParallelLayout, given: Mapping[str, Any], checkpoint: str | None
) -> list[str]:
    problems = layout.problems()
    pp = given.get("pipeline_model_parallel_size") or 1
    per_chunk = given.get("num_layers_per_virtual_pipeline_stage")
    layers = _layers_to_divide(given, checkpoint) if per_chunk else 0
    # Megatron would round, and train with another number of chunks than the user asked for.
    if per_chunk and layers % (pp * per_chunk):
        problems.append(
            f"--num-layers-per-virtual-pipeline-stage {per_chunk} x "
            f"--pipeline-model-parallel-size {pp} does not divide the {layers} layers: use "
            "another number, or --num-virtual-stages-per-pipeline-rank"
        )
    return problems


def fsdp_notices(given: Mapping[str, Any]) -> list[str]:
    """Name Megatron's flags that have no effect with FSDP in one notice."""
    # FSDP reads the shape from config.json, which the checks compare with these flags.
    known = {*SHAPE, *ARCHITECTURE, *_TABLE["understood_by_fsdp"]}
    defaults = {name: entry.flag.default for name, entry in by_name("megatron").items()}
    # what FSDP does anyway needs no notice
    as_usual = {**defaults, "attention_dropout": 0, "hidden_dropout": 0}
    idle = [name for name, value in given.items() if name not in known and value != as_usual[name]]
    if not idle:
        return []
    shown = ", ".join("--" + name.replace("_", "-") for name in sorted(idle))
    return [f"these Megatron flags have no effect with --train-backend fsdp: {shown}"]


def check_shard_size(size: int | None, ranks: int) -> list[str]:
    if size is None or size < 1 or ranks % size == 0:  # the range check reports a size below 1
        return []
    sizes = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
    return [
        f"--fsdp-shard-size {size} does not divide the {ranks} training ranks: use one of "
        f"{sizes}, or leave it out"
    ]
