"""The segments of a pack in the form that attention kernels need: on the device, grouped by length;
and the sums and gathers with gradients over the ranks of context parallelism, which divide the
tokens of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from slime.models.autograd import Context, Gradients

if TYPE_CHECKING:
    from slime.data.packing import PackLayout


def _gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _scattered_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class GatherRows(torch.autograd.Function):
    """The rows ``[rows, ...]`` of all ranks of a group, concatenated in order of rank: ``[ranks *
    rows, ...]``.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.settings = (group,)
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        # Every rank used every row, so the gradient of a row is the sum over ranks; each gets the
        # part of its own rows. That is a reduce-scatter, the mirror image of the gather.
        return _scattered_sum(grads[0], *ctx.settings), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.settings = (group,)
        return _scattered_sum(x, group)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        return _gathered(grads[0], *ctx.settings), None


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.settings = (group,)
        # all_reduce works in place, and autograd may still need x.
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.settings[0])
        return total, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: ProcessGroup, to_heads: bool) -> Tensor:
        ctx.settings = group, to_heads
        return _exchanged(x, group, to_heads)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        group, to_heads = ctx.settings
        return _exchanged(grads[0], group, not to_heads), None, None


def _exchanged(x: Tensor, group: ProcessGroup, to_heads: bool) -> Tensor:
    size = group.size()
    # What is sent to each rank, and arrives from each: [ranks, T, heads of a rank, ...].
    sent = x.unflatten(1, (size, -1)).transpose(0, 1) if to_heads else x.unflatten(0, (size, -1))
    sent = sent.contiguous()
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent, group=group)
    return arrived.flatten(0, 1) if to_heads else arrived.transpose(0, 1).flatten(1, 2)


def rows_to_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange all heads of this rank's rows, ``[T, ranks · H, ...]``, for the rows of all ranks
    with this rank's heads, ``[ranks · T, H, ...]``."""
    return _Exchange.apply(x, group, True)


def heads_to_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """The inverse of :func:`rows_to_heads`."""
    return _Exchange.apply(x, group, False)


def gather_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenate ``[T, ...]`` of all ranks to ``[ranks · T, ...]``. In backward, gradients are
    summed over ranks.
    """
    return GatherRows.apply(x, group)


def scatter_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's ``[T, ...]`` of the sum of ``[ranks · T, ...]`` over ranks: the inverse of
    :func:`gather_rows` where each row is 0 on all ranks but one. In backward, each rank gets the
    gradients of all rows."""
    return _ScatterSum.apply(x, group)


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of tensors of any shape over ranks. The loss is the sum over all ranks, so
    gradients are summed over ranks as well."""
    return _SumOver.apply(x, group)


BOUND_MULTIPLE = 128
MAX_PADDING_SHARE = 0.25
"""Maximum fraction of padding rows in a bucket of segments."""


def to_device(array: np.ndarray, device: torch.device | str) -> Tensor:
    """Copy an array to a device, without waiting for kernels that run there."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class Block:
    """Segments of similar length that each attend causally to themselves.

    Attributes:
        rows: int64 ``[N]``, the rows of the segments in the pack, one segment after the other.
        slots: int64 ``[N]``, the position of each row in the padded ``[n * length]``; None without
            padding.
        n: Number of segments.
        length: Length of the longest segment. Shorter ones are padded at their end, which no
            earlier token sees.
    """

    rows: Tensor
    slots: Tensor | None
    n: int
    length: int


@dataclass(frozen=True)
class PrefixBlock:
    """All segments that attend, without a mask, to one shared prompt."""

    rows: Tensor  # int64 [N]: queries
    contiguous: bool  # these rows are contiguous in the pack
    start: int  # the prompt's rows in the pack
    end: int


@dataclass(frozen=True)
class SequenceBlock(Block):
    """Sequences of similar length, each from its first token: what a layer with a state computes as
    one batch.

    A segment that shares a prompt is a sequence of the prompt's rows and its own. Of its outputs,
    only those of its own rows are used, as only those of its own queries are in attention.

    Attributes:
        own: int64 ``[M]``, the rows of the pack that get an output.
        picks: int64 ``[M]``, their positions in the padded ``[n * length]``.
    """

    own: Tensor
    picks: Tensor

    def gather(self, rows: Tensor) -> Tensor:
        """Return the sequences ``[n, length, H]`` of the rows of a pack, ``[T, H]``."""
        batch = rows.index_select(0, self.rows)
        if self.slots is not None:
            padded = batch.new_zeros(self.n * self.length, batch.shape[1])
            batch = padded.index_copy(0, self.slots, batch)
        return batch.unflatten(0, (self.n, self.length))


@dataclass(frozen=True)
class PackSegments:
    """What the attention of every layer needs to know about a pack. It is built once per pack.

    ``cu_seqlens_*``, ``kv_index`` and ``max_*`` are those of PackLayout. ``own`` and ``prefixes``
    contain the same for the CPU, where the queries of all samples that share a prompt are
    multiplied with that prompt at once. ``sequences`` is there for models whose layers need whole
    sequences. ``image_blocks``, int64 ``[T]``, numbers the images whose tokens attend to their
    whole image (-1 for text); None without such images. With a ``group`` (context parallelism),
    ``kv_index`` and ``sequences`` refer to the rows of all its ranks. ``whole`` describes these rows
    as one pack, where each rank computes some heads of the attention over all of them
    (``--context-parallel-kind ulysses``); otherwise it is None.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    kv_index: Tensor | None
    max_q: int
    max_k: int
    num_tokens: int
    own: list[Block] = field(default_factory=list)
    prefixes: list[PrefixBlock] = field(default_factory=list)
    group: ProcessGroup | None = None
    sequences: list[SequenceBlock] = field(default_factory=list)
    image_blocks: Tensor | None = None
    whole: PackSegments | None = None

    @classmethod
    def from_layout(
        cls,
        layout: PackLayout,
        device: torch.device | str,
        group: ProcessGroup | None = None,
        with_sequences: bool = False,
        deal_sequences: bool = False,
    ) -> PackSegments:
        """Describe a pack.

        Args:
            group: The ranks that divide the tokens of each sample; None without context
                parallelism.
            with_sequences: Whether to list the sequences of the pack.
            deal_sequences: Whether to list only those that are dealt to this rank of ``group``:
                each rank gets about as many tokens as the others.
        """
        on_cpu = torch.device(device).type == "cpu" and group is None
        # Kernels need only upper bounds. Rounded ones avoid a recompilation for each length.
        largest = [
            x if on_cpu else -(-x // BOUND_MULTIPLE) * BOUND_MULTIPLE
            for x in (layout.max_q, layout.max_k)
        ]

        own_rows = [np.arange(*ranges[-1]) for ranges in layout.kv_ranges] if on_cpu else []

        def move(array: np.ndarray) -> Tensor:
            return to_device(array, device)

        return cls(
            cu_seqlens_q=move(layout.cu_seqlens_q),
            cu_seqlens_k=move(layout.cu_seqlens_k),
            kv_index=None if layout.kv_index is None else move(layout.kv_index),
            max_q=largest[0],
            max_k=largest[1],
            num_tokens=len(layout.tokens),
            own=[
                Block(*_padded([own_rows[i] for i in sorted(bucket)], device))
                for bucket in _similar(layout.q_lens)
            ]
            if on_cpu
            else [],
            prefixes=_prefix_blocks(layout) if on_cpu else [],
            sequences=_sequence_blocks(layout, device, group if deal_sequences else None)
            if with_sequences
            else [],
            group=group,
        )

    @cached_property
    def spans(self) -> list[tuple[int, int, int, int]]:
        """Where the queries and the keys of each segment begin and end (the host waits for this)."""
        q, k = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        return list(zip(q[:-1], q[1:], k[:-1], k[1:], strict=True))

    def rows_of_all(self, rows: Tensor) -> Tensor:
        """Return the rows of all context-parallel ranks, to which ``sequences`` refer."""
        return rows if self.group is None else gather_rows(rows, self.group)

    def own_rows(self, out: Tensor) -> Tensor:
        """Return the outputs of this rank's rows, each of which one of the context-parallel ranks
        has computed.
        """
        return out if self.group is None else scatter_sum(out, self.group)


def _similar(lens: np.ndarray) -> list[list[int]]:
    """Group segments of similar length, such that the padding of each group stays below its
    limit.
    """
    buckets: list[list[int]] = []
    tokens = 0
    for i in np.argsort(-lens, kind="stable"):
        # Longest first: a bucket is as wide as its first segment, and each further one adds the
        # difference as padding.
        longest = lens[buckets[-1][0]] if buckets else 0
        if not buckets or (tokens + lens[i]) < (1 - MAX_PADDING_SHARE) * longest * (
            len(buckets[-1]) + 1
        ):
            buckets.append([])
            tokens = 0
        buckets[-1].append(int(i))
        tokens += int(lens[i])
    return buckets


def _sequence_blocks(
    layout: PackLayout, device: torch.device | str, dealt: ProcessGroup | None
) -> list[SequenceBlock]:
    sequences, own_lens = _sequences(layout, dealt)
    lens = np.asarray([len(sequence) for sequence in sequences])
    blocks = []
    for bucket in _similar(lens):
        rows, slots, n, length = _padded([sequences[i] for i in bucket], device)
        ends = [lens[i] + slot * length for slot, i in enumerate(bucket)]
        picks = [np.arange(end - own_lens[i], end) for end, i in zip(ends, bucket, strict=True)]
        own = np.concatenate([sequences[i][lens[i] - own_lens[i] :] for i in bucket])
        given = to_device(own, device), to_device(np.concatenate(picks), device)
        blocks.append(SequenceBlock(rows, slots, n, length, *given))
    return blocks


def _padded(
    parts: list[np.ndarray], device: torch.device | str
) -> tuple[Tensor, Tensor | None, int, int]:
    """Return the fields of a :class:`Block` of these rows."""
    length = max(map(len, parts))
    slots = np.concatenate([np.arange(len(x)) + slot * length for slot, x in enumerate(parts)])
    padded = len(slots) != len(parts) * length
    rows = to_device(np.concatenate(parts), device)
    return rows, to_device(slots, device) if padded else None, len(parts), length


def _sequences(
    layout: PackLayout, dealt: ProcessGroup | None
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the rows of each sequence, and how many of them, at its end, get an output."""
    sequences, own_lens = layout.whole_samples, layout.q_lens
    if sequences is None:
        sequences = [np.concatenate([np.arange(*r) for r in ranges]) for ranges in layout.kv_ranges]
    else:
        own_lens = np.asarray([len(sequence) for sequence in sequences])
    if dealt is None:
        return sequences, own_lens
    mine = deal_sequences([len(sequence) for sequence in sequences], dealt.size())[dealt.rank()]
    if not mine:
        # Every rank needs a gradient of the layer's parameters, so this one computes a row that
        # gets no output.
        return [sequences[0][:1]], np.zeros(1, np.int64)
    return [sequences[i] for i in mine], own_lens[mine]


def deal_sequences(lens: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the numbers of each rank's sequences. The longest ones are dealt first, each to the
    rank with the fewest tokens.
    """
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(lens)), key=lambda i: -lens[i]):
        min(hands, key=lambda hand: sum(lens[j] for j in hand)).append(i)
    return hands


def _prefix_blocks(layout: PackLayout) -> list[PrefixBlock]:
    queries: dict[tuple[int, int], list[np.ndarray]] = {}
    for start, length, ranges in zip(layout.q_starts, layout.q_lens, layout.kv_ranges, strict=True):
        *before, own = ranges
        assert own == (start, start + length), "a segment's own keys come last"
        for prompt in before:
            queries.setdefault(prompt, []).append(np.arange(start, start + length))
    blocks = []
    for prompt, parts in queries.items():
        rows = np.concatenate(parts)
        contiguous = bool((np.diff(rows) == 1).all())
        blocks.append(PrefixBlock(torch.from_numpy(rows), contiguous, *prompt))
    return blocks
