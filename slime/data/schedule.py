"""Assigns samples to optimizer steps, data-parallel ranks and micro-batches, and groups to the parts
of a rollout with ``--train-during-rollout``, which are trained while the rest is generated.

A part is a number of groups in the order in which they finished. All parts together are one
optimizer step. Which groups a part has depends only on that order and not on when the trainer asks
for it, so a deterministic run is repeated bit for bit. Pure Python.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, TypeVar

from slime.config.algorithm import registered_loss
from slime.config.args import Args
from slime.config.hf_config import model_config
from slime.config.layout import ParallelLayout
from slime.data.balance import ModelShape, first_fit, forward_flops, split_in_two
from slime.data.lock_step import Items, deal, pack_in_lock_step

if TYPE_CHECKING:
    from slime.config.layout import BatchConfig

logger = logging.getLogger(__name__)

Schedule = tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]
Prompts = Sequence[tuple[Hashable, int]]
"""For each sample, the key and the length of what it shares with others; see
:func:`slime.data.convert.shared_prompts`.
"""


@dataclass(frozen=True)
class PackingSettings:
    """How samples are put into micro-batches.

    Attributes:
        dynamic: Micro-batches hold up to ``max_tokens`` tokens per GPU, instead of
            ``micro_batch_size`` samples.
        forward_max_tokens: The same limit for passes without a backward; None: these use the
            micro-batches of training.
        balanced: Micro-batches of the same step should have equal costs.
        pads: Samples are padded to the longest one of the micro-batch, instead of packed into one
            row.
        shares_prompts: Samples with the same prompt store it once per pack.
        shape: The model's dimensions, for the costs; None if they are not known.
        whole_rollouts: The samples of a rollout must be in one micro-batch, in their order.
        global_batch_size: Rollouts of an optimizer step over all ranks.
        steps: If above 0, a rollout has so many steps, whatever ``global_batch_size`` is: its
            samples are a part of a dump, and the number of steps is the same as with the whole
            dump.
    """

    dynamic: bool = False
    max_tokens: int = 0
    forward_max_tokens: int | None = None
    micro_batch_size: int = 1
    balanced: bool = False
    pads: bool = False
    shares_prompts: bool = False
    shape: ModelShape | None = None
    whole_rollouts: bool = False
    global_batch_size: int = 0
    steps: int = 0

    @classmethod
    def from_args(cls, args: Args) -> PackingSettings:
        pads = args.attn_implementation not in (None, "varlen")
        loss = registered_loss(args)
        return cls(
            dynamic=args.use_dynamic_batch_size,
            max_tokens=args.max_tokens_per_gpu or 0,
            forward_max_tokens=args.log_probs_max_tokens_per_gpu,
            micro_batch_size=args.micro_batch_size or 1,
            balanced=bool(args.balance_data or args.balance_by_flops),
            pads=pads,
            # The engine may have routed the same prompt to different experts for each sample, so
            # replayed routing needs a copy of the prompt per sample.
            shares_prompts=bool(
                args.share_prompt_in_pack and not pads and not args.use_rollout_routing_replay
            ),
            shape=ModelShape.from_megatron(args.megatron)
            or ModelShape.from_config(model_config(args.hf_checkpoint)),
            whole_rollouts=loss is not None and loss.whole_rollouts,
            global_batch_size=args.global_batch_size or 0,
            steps=(args.num_steps_per_rollout or 1)
            if args.load_debug_rollout_data_subsample
            else 0,
        )


def build_dp_schedule(
    settings: PackingSettings,
    layout: ParallelLayout,
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
    prompts: Prompts | None = None,
    parts: Sequence[list[int]] | None = None,
) -> Schedule:
    """Split a rollout's samples into optimizer steps, micro-batches and ranks.

    Samples with the same rollout id (fan-out siblings) stay in one step, and a step holds
    ``global_batch_size`` rollouts. In a step, every rank gets the same number of micro-batches.

    Args:
        layout: That of the training ranks.
        total_lengths: Number of tokens of each sample.
        global_batch_size: Rollouts per optimizer step over all ranks.
        rollout_indices: Rollout id of each sample.
        prompts: For each sample, the key of its prompt and the prompt's number of tokens. Samples
            with equal keys in a micro-batch store the prompt once. None: nothing is shared. Only
            the lock-step packing uses it.
        parts: The positions of the samples of each part of the rollout, which are scheduled in
            place of optimizer steps (``--train-during-rollout``).

    Returns:
        ``partitions[rank]``: sample positions in training order; ``micro_batch_indices[rank]``: for
        each micro-batch, positions within ``partitions[rank]``; ``num_microbatches[step]``: per
        rank; ``global_batch_sizes[step]``: number of rollouts. Rollouts that do not fill a whole
        step are left out, with a warning.

    Raises:
        ValueError: There are too few rollouts for a step, or the micro-batches cannot be
            distributed evenly.
    """
    units: list[list[int]] | None = None
    # What stays together in a micro-batch is scheduled as one sample of its joint length.
    if settings.whole_rollouts:
        units = _rollouts(rollout_indices)
        total_lengths = [sum(total_lengths[i] for i in unit) for unit in units]
        rollout_indices = range(len(units))
        prompts = parts = None
    steps = parts or _steps(rollout_indices, len(total_lengths), global_batch_size)
    partitions: list[list[int]] = [[] for _ in range(layout.dp)]
    micro_batch_indices: list[list[list[int]]] = [[] for _ in range(layout.dp)]
    num_microbatches = []
    for step, samples in enumerate(steps):
        by_rank = _pack_step(settings, layout, samples, total_lengths, prompts, step)
        num_microbatches.append(len(by_rank[0]))
        for rank, micro_batches in enumerate(by_rank):
            for micro_batch in micro_batches:
                start = len(partitions[rank])
                if units is not None:
                    micro_batch = [i for unit in micro_batch for i in units[unit]]
                partitions[rank] += micro_batch
                micro_batch_indices[rank].append(list(range(start, len(partitions[rank]))))
    return partitions, micro_batch_indices, num_microbatches, [global_batch_size] * len(steps)


def pack_forward_only(
    settings: PackingSettings,
    total_lengths: Sequence[int],
    prompts: Prompts | None,
    cap: int,
    at_least: int = 1,
) -> list[list[int]]:
    """Pack the samples of one rank for passes without a backward, which keep no activations.

    Args:
        total_lengths: Number of tokens of each sample.
        prompts: As in :func:`build_dp_schedule`.
        cap: Maximum tokens of a pack; only a single longer sample may exceed it.
        at_least: Minimum number of packs, if there are enough samples; the cap may require more.

    Returns:
        Packs with about equal estimated FLOPs, the largest first, so that ranks that run the same
        number of packs in lock step wait little for each other. Every sample is in exactly one
        pack.
    """
    if not len(total_lengths):
        return []
    items = _items(settings, list(range(len(total_lengths))), total_lengths, prompts)
    packed = pack_in_lock_step(items, 1, cap, at_least=min(at_least, len(total_lengths)))
    packs = packed[0] if packed is not None else first_fit(total_lengths, cap)
    return sorted(packs, key=lambda pack: (-items.size(pack)[1], pack))


def _rollouts(rollout_indices: Sequence[int]) -> list[list[int]]:
    """The positions of the samples of each rollout; rollouts are in the order of their first
    sample.
    """
    members: dict[int, list[int]] = {}
    for position, rollout in enumerate(rollout_indices):
        members.setdefault(rollout, []).append(position)
    return list(members.values())


def _steps(
    rollout_indices: Sequence[int], num_samples: int, global_batch_size: int
) -> list[list[int]]:
    """The positions of the samples of each optimizer step; rollouts are in the order of their first
    sample.
    """
    if len(rollout_indices) != num_samples:
        raise ValueError(f"{num_samples} samples but {len(rollout_indices)} rollout ids")
    rollouts = _rollouts(rollout_indices)
    count = len(rollouts)
    num_steps = count // global_batch_size
    if num_steps < 1:
        raise ValueError(
            f"{count} rollouts are less than one optimizer step of --global-batch-size "
            f"{global_batch_size}: --rollout-batch-size x --n-samples-per-prompt must be at least "
            "that number"
        )
    if rest := count % global_batch_size:
        logger.warning(
            f"{count} rollouts = {num_steps} steps x {global_batch_size} + {rest}: the last {rest} "
            "are not trained on"
        )
    members = iter(rollouts)
    return [list(chain(*islice(members, global_batch_size))) for _ in range(num_steps)]


def _pack_step(
    settings: PackingSettings,
    layout: ParallelLayout,
    samples: list[int],
    total_lengths: Sequence[int],
    prompts: Prompts | None,
    step: int,
) -> list[list[list[int]]]:
    """Pack the samples of one optimizer step as ``[rank][micro-batch]``.

    With ``--use-dynamic-batch-size``, a micro-batch holds at most ``max_tokens_per_gpu * cp_size``
    tokens; only a single longer sample may exceed that. With ``--balance-data`` or
    ``--balance-by-flops``, micro-batches are packed by estimated FLOPs for ranks that run in lock
    step (see :mod:`slime.data.lock_step`). Otherwise they are filled first-fit in the order of the
    samples, the largest are halved until their number is a multiple of the number of ranks, and
    they are assigned round-robin.

    Without ``--use-dynamic-batch-size``, a micro-batch is ``micro_batch_size`` consecutive samples.
    Micro-batches are assigned round-robin or, with ``--balance-data``, such that ranks have about
    equal FLOPs in each of them.
    """
    # Megatron's interleaved pipeline schedule runs the micro-batches of a rank in groups.
    multiple = layout.dp * layout.vpp_group
    if settings.dynamic:
        # With context parallelism, a micro-batch is spread over the GPUs of its ranks.
        cap = settings.max_tokens * layout.cp
        if settings.balanced:
            items = _items(settings, samples, total_lengths, prompts)
            packed = pack_in_lock_step(items, layout.dp, cap, layout.vpp_group)
            if packed is not None:
                return [[[samples[i] for i in batch] for batch in rank] for rank in packed]
        bins = first_fit([total_lengths[i] for i in samples], cap)
        micro_batches = [[samples[i] for i in b] for b in bins]
        _align(micro_batches, multiple, total_lengths, step)
    else:
        micro_batches = _pack_static(settings, samples, multiple, step)
    if settings.balanced:
        flops = [
            sum(forward_flops(settings.shape, total_lengths[i]) for i in batch)
            for batch in micro_batches
        ]
        return deal(micro_batches, flops, layout.dp)
    return [micro_batches[rank :: layout.dp] for rank in range(layout.dp)]


def _items(
    settings: PackingSettings,
    samples: list[int],
    total_lengths: Sequence[int],
    prompts: Prompts | None,
) -> Items:
    keys = [(None, 0) if prompts is None else prompts[i] for i in samples]
    return Items(
        tokens=[total_lengths[i] for i in samples],
        costs=[forward_flops(settings.shape, total_lengths[i]) for i in samples],
        prompts=[key for key, _ in keys],
        prompt_tokens=[length for _, length in keys],
        prompt_costs=[forward_flops(settings.shape, length) for _, length in keys],
    )


def _align(
    micro_batches: list[list[int]], multiple: int, total_lengths: Sequence[int], step: int
) -> None:
    """Make the number of micro-batches a multiple of ``multiple``, by halving the largest ones of
    several samples.

    If only single samples are left (for example an odd number of long fan-out samples), the
    shortest are joined.
    """

    def tokens_in(j: int) -> int:
        return sum(total_lengths[i] for i in micro_batches[j])

    while len(micro_batches) % multiple:
        divisible = [j for j, batch in enumerate(micro_batches) if len(batch) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda j: (tokens_in(j), -j))
        first, second = split_in_two(micro_batches[largest], lambda i: total_lengths[i])
        micro_batches[largest] = first
        micro_batches.append(second)
    surplus = len(micro_batches) % multiple
    if not surplus:
        return
    if len(micro_batches) < multiple:
        raise ValueError(
            f"step {step} has {len(micro_batches)} samples for {multiple} data-parallel ranks x "
            "micro-batch group, too few for one each: use a larger --global-batch-size or fewer "
            "ranks"
        )
    # This may exceed the token limit. The warning tells how large the largest micro-batch has
    # become.
    for _ in range(surplus):
        a, b = sorted(sorted(range(len(micro_batches)), key=lambda j: (tokens_in(j), j))[:2])
        micro_batches[a] = sorted(micro_batches[a] + micro_batches.pop(b))
    logger.warning(
        f"step {step}: {len(micro_batches) + surplus} single samples cannot be split evenly over "
        f"{multiple}: joined the shortest, the largest has "
        f"{max(map(tokens_in, range(len(micro_batches))))} tokens"
    )


def _pack_static(
    settings: PackingSettings, samples: list[int], multiple: int, step: int
) -> list[list[int]]:
    size = settings.micro_batch_size
    micro_batches = [samples[i : i + size] for i in range(0, len(samples), size)]
    if len(micro_batches) % multiple:
        raise ValueError(
            f"step {step}: {len(samples)} samples / micro-batch-size {size} = "
            f"{len(micro_batches)} micro-batches, not a multiple of {multiple} (data-parallel "
            "ranks x micro-batch group): use --use-dynamic-batch-size, or change one of these "
            "numbers"
        )
    return micro_batches


T = TypeVar("T")


def cut(groups: Sequence[T], batch: BatchConfig, ranks: int) -> list[Sequence[T]]:
    """Divide groups into at most ``--train-during-rollout`` parts of equal size; the last part has
    the rest, and is no smaller than the others.

    Args:
        groups: Those of a whole rollout, or the first of them.
        ranks: The data-parallel size. Every rank needs a sample of each part.
    """
    count = batch.train_during_rollout
    size = max(batch.rollout_batch_size // count, math.ceil(ranks / batch.n_samples_per_prompt))
    last = min(max(len(groups) // size, 1), count) - 1
    return [*(groups[i * size : (i + 1) * size] for i in range(last)), groups[last * size :]]


def ready(groups: Sequence[T], batch: BatchConfig, ranks: int, number: int) -> list[T]:
    """Return part ``number`` of a rollout of which only these groups are finished; nothing if it
    lacks some, or is the last one.
    """
    whole = cut(range(batch.rollout_batch_size), batch, ranks)
    if number + 1 >= len(whole) or whole[number][-1] >= len(groups):
        return []
    return [groups[i] for i in whole[number]]
