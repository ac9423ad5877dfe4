"""The parallel layout of the training ranks: tensor, context, data, pipeline and expert
parallelism.

The order of ranks is Megatron's default: tensor parallel ranks are adjacent, followed by context,
data and pipeline parallel ones. FSDP uses the same order with context and data parallelism only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.registry import find, parts

if TYPE_CHECKING:
    from slime.config.args import Args


def context_ranks(given: Mapping[str, Any]) -> int:
    """Return the number of ranks that share a sample, from the given flags of Megatron."""
    return int(given.get("context_parallel_size") or 1)


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
        """Return the layout of ``args.world_size`` ranks. A backend that registers none, such as
        FSDP, has data and context parallelism only.
        """
        if args.train_backend in parts("layout"):
            found: ParallelLayout = find("layout", args.train_backend)(args)
            return found
        return cls(world_size=args.world_size, cp=context_ranks(args.megatron))

    @property
    def dp(self) -> int:
        """The data-parallel size: the number of ranks (or groups of ranks) that train on different
        samples.
        """
        return max(self.world_size // (self.tp * self.pp * self.cp), 1)

    def data_rank(self, rank: int) -> int:
        """Return the data-parallel index of a rank: which share of the samples it trains on."""
        return rank // (self.tp * self.cp) % self.dp

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


def check_shard_size(size: int | None, ranks: int, experts: int = 1) -> list[str]:
    """Check ``--fsdp-shard-size`` and ``--fsdp-expert-parallel-size`` (``experts``)."""
    if size is None or size < 1 or ranks % size == 0:  # the range check reports a size below 1
        shards = size if size and size > 0 else ranks
        if experts < 1 or shards % experts == 0:
            return []
        return [
            f"--fsdp-expert-parallel-size {experts} does not divide the {shards} ranks that share "
            "a replica of the model: use a divisor, or change --fsdp-shard-size"
        ]
    sizes = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
    return [
        f"--fsdp-shard-size {size} does not divide the {ranks} training ranks: use one of "
        f"{sizes}, or leave it out"
    ]
