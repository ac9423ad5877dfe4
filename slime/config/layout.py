"""The parallel layout of the training ranks (tensor, context, data, pipeline and expert parallelism),
and the flags of batches: how the samples of a rollout are split into optimizer steps and
micro-batches, over these ranks.

The order of ranks is Megatron's default: tensor parallel ranks are adjacent, followed by context,
data and pipeline parallel ones. FSDP uses the same order with context and data parallelism only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.config.flag import Section, flag
from slime.config.rollout import (
    DEFAULT_ROLLOUT_FUNCTION,
    RolloutConfig,
    longest_sample,
    served_context,
)
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


MIN_TOKEN_BUDGET = 4096
"""Number of tokens in a micro-batch that every machine should be able to train."""


@dataclass
class BatchConfig(Section):
    _title = "batches"

    rollout_batch_size: int = flag(32, low=1)
    """Number of prompts per rollout"""
    n_samples_per_prompt: int = flag(8, low=1)
    """Number of samples per prompt, which form a group. With --loss-type sft_loss the default is
    1
    """
    global_batch_size: int = flag(low=1)
    """Number of samples per optimizer step. Default: --rollout-batch-size x --n-samples-per-prompt
    / --num-steps-per-rollout"""
    num_steps_per_rollout: int = flag(low=1)
    """Number of optimizer steps per rollout. Default: 1, or what --global-batch-size implies"""
    train_during_rollout: int = flag(1, low=1)
    """Most parts into which the groups of a rollout are divided, in the order in which they finish.
    Each but the last is trained once its groups are finished, while the rest is generated; the
    optimizer's step follows the last. 1 trains after the rollout"""
    micro_batch_size: int = flag(1, low=1)
    """Number of samples per micro-batch; giving this flag disables --use-dynamic-batch-size"""
    use_dynamic_batch_size: bool = flag()
    """Fill each micro-batch with samples up to --max-tokens-per-gpu tokens. Default: on, unless
    --micro-batch-size is given or batches are padded (--attn-implementation)"""
    max_tokens_per_gpu: int | None = flag(low=1)
    """Maximum tokens of a micro-batch on one GPU. Default: measured at the start on GPUs; on a CPU,
    with --deterministic or in float32, the longest prompt and response that the flags allow, but at
    least 4096"""
    log_probs_max_tokens_per_gpu: int | None = flag(low=1, same_as="max_tokens_per_gpu")
    """Maximum tokens of a micro-batch in passes without a backward pass (log-probs, entropy,
    values); 2 to 4 times --max-tokens-per-gpu usually fits. Default: the micro-batches of
    training"""
    balance_data: bool = flag()
    """Distribute samples so that all ranks have about the same work (estimated FLOPs) in each
    micro-batch. Default:
    on with --use-dynamic-batch-size"""
    balance_by_flops: bool = False
    """Synonym of --balance-data; needs --use-dynamic-batch-size"""
    data_pad_size_multiplier: int = flag(128, low=1)
    """Pad each pack of sequences to a multiple of N tokens"""


def derive_batch(args: Args) -> list[str]:
    """Derive missing batch sizes so that rollout_batch_size x n_samples_per_prompt =
    global_batch_size x num_steps_per_rollout, and report sizes that do not satisfy this."""
    if args.loss_type == "sft_loss" and "n_samples_per_prompt" not in args.explicit:
        # SFT samples nothing, so a group would hold copies of one conversation
        args.n_samples_per_prompt = 1
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    given = (
        f"--rollout-batch-size {args.rollout_batch_size} x "
        f"--n-samples-per-prompt {args.n_samples_per_prompt} = {samples}"
    )
    _size_micro_batches(
        args,
        explicit=args.explicit,
        padded=args.attn_implementation not in (None, "varlen"),
        longest=longest_sample(args, served_context(args), context_ranks(args.megatron)),
    )
    size = args.global_batch_size
    steps = args.num_steps_per_rollout
    # the range checks report it
    if min(samples, 1 if size is None else size, 1 if steps is None else steps) < 1:
        return []
    # Of the identity's four numbers, the missing one follows from the others.
    implied_steps = steps or (samples // size if size else 1)
    implied_size = size or samples // implied_steps
    if implied_size * implied_steps == samples:
        args.fill(global_batch_size=implied_size, num_steps_per_rollout=implied_steps)
        return []
    if size is None:
        return [f"{given} samples cannot be split into --num-steps-per-rollout {steps} equal steps"]
    if steps is None:
        # Suggest the nearest divisor, and of two that are equally near the larger one.
        fits = [n for n in range(1, samples + 1) if samples % n == 0]
        near = min(fits, key=lambda n: (abs(n - size), -n))
        return [f"{given}, which is not a multiple of --global-batch-size {size}; {near} would fit"]
    return [
        f"{given}, but --global-batch-size {size} x --num-steps-per-rollout {steps} = "
        f"{size * steps}: leave out one of the last two flags; its value follows from the others"
    ]


def _size_micro_batches(
    batch: BatchConfig, explicit: Collection[str], padded: bool, longest: int
) -> None:
    """Size micro-batches by tokens, unless the user sets their size in samples.

    Here the token budget follows from flags alone. The default needs no more memory than the
    longest sample, which has to fit in any case. On GPUs the driver replaces the default by a
    measured one (``backends/token_budget.py``). On a CPU it stays, because engines, object store and
    trainer share the memory, and larger packs are not faster there.
    """
    batch.fill(use_dynamic_batch_size="micro_batch_size" not in explicit and not padded)
    batch.fill(balance_data=batch.use_dynamic_batch_size or batch.balance_by_flops)
    if batch.use_dynamic_batch_size:
        batch.fill(max_tokens_per_gpu=max(MIN_TOKEN_BUDGET, longest))


def check_split(layout: ParallelLayout, batch: BatchConfig, rollout: RolloutConfig) -> list[str]:
    """Check that the samples of a step can be distributed over the data-parallel ranks: evenly in
    micro-batches of a fixed size, and otherwise at least one for each rank."""
    if batch.num_steps_per_rollout is None or not batch.global_batch_size:
        return []
    ranks = f"{layout.dp} data-parallel training ranks" + (
        f" x {layout.vpp_group} pipeline stages" if layout.vpp_group > 1 else ""
    )
    unit = layout.dp * layout.vpp_group
    if not batch.use_dynamic_batch_size:
        unit *= batch.micro_batch_size
        if unit < 1 or batch.global_batch_size % unit == 0:
            return []
        return [
            f"--global-batch-size {batch.global_batch_size} is not a multiple of "
            f"--micro-batch-size {batch.micro_batch_size} x {ranks} = {unit}: change one of them, "
            "or pass --use-dynamic-batch-size"
        ]
    # Functions of the user can return several samples for one, so the number of samples is not
    # known in advance.
    if (
        rollout.custom_generate_function_path
        or rollout.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION
        or batch.global_batch_size >= unit
    ):
        return []
    return [
        f"--global-batch-size {batch.global_batch_size} is less than one sample for each of "
        f"{ranks}: use a larger batch or fewer ranks"
    ]
