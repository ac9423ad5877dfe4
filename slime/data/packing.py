"""The layout of a micro-batch whose samples are packed into one row, without padding between them.

A pack is a sequence of *segments*. Without sharing, a segment is one whole sample. With sharing,
the samples of a group are a tree: what several of them begin with, such as the prompt of a group or
the turns before the branches of an agent's session, is stored once, as a segment of its own. The
queries of a segment attend to the keys and values of the segments that come before it in its
samples, and then to their own. In both cases, attention is causal and aligned at the bottom right:
query ``i`` of ``q`` attends to the first ``k - q + i + 1`` of the segment's ``k`` keys. Varlen
attention kernels compute exactly this from ``cu_seqlens_q`` and ``cu_seqlens_k`` after keys and
values were gathered with ``kv_index``.

The layout is plain numpy, so it can be tested without a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

Range = tuple[int, int]
MIN_SHARED_TOKENS = 32
"""A common beginning that is no prompt is shared from this length on: each segment costs attention
a little time.
"""


@dataclass(frozen=True)
class Beginning:
    """The first ``length`` tokens of several samples, which a pack stores once; ``number``
    identifies them.
    """

    number: int
    length: int
    samples: int
    """How many samples begin with it."""


@dataclass(frozen=True)
class PackLayout:
    """The layout of ``n`` samples as ``T`` tokens in ``S`` segments with ``R`` response tokens.

    ================ ============= ==========================================================
    field            shape, type   meaning
    ================ ============= ==========================================================
    tokens           int64 [T]     token ids; padding is 0
    positions        int64 [T]     position of the token in its sample
    q_starts, q_lens int64 [S]     first row and number of rows of each segment
    kv_ranges        S lists       per segment, the ``(start, end)`` rows that hold its keys,
                                   in order: those of the beginnings that it shares with
                                   other segments, if any, then its own
    cu_seqlens_q     int32 [S+1]   cumulative q_lens
    cu_seqlens_k     int32 [S+1]   cumulative numbers of keys
    kv_index         int64 [K]     rows from which keys and values are gathered; None without
                                   sharing, since keys then have the order of the queries
    max_q, max_k     int           longest segment in queries and in keys
    logit_index      int64 [R]     row whose logits score each response token, samples in order
    targets          int64 [R]     ids of the response tokens
    response_lengths list, n       as given
    sample_ranges    n lists       per sample, the ``(start, end)`` rows that hold its tokens
    response_index   list, n       with context parallelism (:func:`build_context_pack`,
                                   :func:`rows_of_rank`): which of a sample's response tokens this
                                   rank scores; otherwise None
    whole_samples    list, n       with context parallelism: the rows of each sample's tokens,
                                   int64 [total_length], in the rows of all ranks
    ================ ============= ==========================================================
    """

    tokens: np.ndarray
    positions: np.ndarray
    kv_ranges: list[list[Range]]
    cu_seqlens_q: np.ndarray
    cu_seqlens_k: np.ndarray
    kv_index: np.ndarray | None
    logit_index: np.ndarray
    targets: np.ndarray
    response_lengths: list[int]
    sample_ranges: list[list[Range]]
    response_index: list[np.ndarray] | None = None
    whole_samples: list[np.ndarray] | None = None

    @property
    def q_starts(self) -> np.ndarray:
        return self.cu_seqlens_q[:-1].astype(np.int64)

    @property
    def q_lens(self) -> np.ndarray:
        return np.diff(self.cu_seqlens_q).astype(np.int64)

    @property
    def max_q(self) -> int:
        return int(self.q_lens.max())

    @property
    def max_k(self) -> int:
        return int(np.diff(self.cu_seqlens_k).max())

    def rows_of(self, sample: int) -> np.ndarray:
        """The rows of the pack that hold the tokens of one sample, in order: int64
        [total_length].
        """
        return _indices(self.sample_ranges[sample])


def build_pack(
    tokens: Sequence[Sequence[int] | np.ndarray],
    response_lengths: Sequence[int],
    group_keys: Sequence[Hashable] | None = None,
    share_prompts: bool = False,
    pad_to_multiple: int = 1,
) -> PackLayout:
    """Lay out samples in one pack.

    Args:
        tokens: Prompt + response ids of each sample, as lists, arrays or CPU tensors. Its first
            response token is predicted from a prompt token, so it needs one.
        response_lengths: Number of tokens at the end of each sample that are its response.
        group_keys: Only samples with equal keys may share tokens. None: all samples may.
        share_prompts: Whether equal prompts (``tokens[:total - response]``) of a group, and other
            common beginnings (see :func:`shared_beginnings`), are stored once.
        pad_to_multiple: The number of tokens is padded to a multiple of this.
    """
    arrays = [np.asarray(t, dtype=np.int64) for t in tokens]
    prompt_lens = [len(t) - r for t, r in zip(arrays, response_lengths, strict=True)]
    shared: list[list[Beginning]] = [[] for _ in arrays]
    if share_prompts:
        # Tokens that only one sample has stay in one segment. If nothing is shared, keys need no
        # gathering.
        shared = shared_beginnings(arrays, prompt_lens, group_keys)
    builder = _Builder()
    stored: dict[int, Range] = {}  # the rows of each shared beginning
    sample_ranges = []
    for array, prompt_len, beginnings in zip(arrays, prompt_lens, shared, strict=True):
        rows: list[Range] = []
        start = 0
        for beginning in beginnings:
            if beginning.number not in stored:
                part = array[start : beginning.length]
                stored[beginning.number] = builder.append(part, start, rows)
            rows.append(stored[beginning.number])
            start = beginning.length
        rows.append(builder.append(array[start:], start, rows))
        sample_ranges.append(rows)
        # The logits of a row predict the next token, so each response token is scored by the row of
        # the token before it. The last row of a shared prompt scores the first response token of
        # all its samples.
        builder.logit_index.append(_indices(rows)[prompt_len - 1 : -1])
        builder.targets.append(array[prompt_len:])
    # Padding is a segment of its own, so that no token attends to it.
    num_padding = -builder.size % pad_to_multiple
    builder.append(np.zeros(num_padding, np.int64), 0, [])
    return builder.finish(
        kv_ranges=builder.kv_ranges,
        kv_index=np.concatenate(builder.keys) if stored else None,
        response_lengths=list(map(int, response_lengths)),
        sample_ranges=sample_ranges,
    )


def shared_beginnings(
    arrays: Sequence[np.ndarray],
    prompt_lens: Sequence[int],
    group_keys: Sequence[Hashable] | None = None,
) -> list[list[Beginning]]:
    """Find what samples of a group have in common at their beginning, the inner nodes of a tree of
    tokens.

    Equal prompts are shared whatever their length, and other beginnings if they save
    ``MIN_SHARED_TOKENS`` tokens per sample beyond what is shared anyway: the turns that come before
    the branches of an agent's session, a long system prompt of different prompts, and equal
    beginnings of responses.

    Args:
        arrays: The tokens of each sample, ``[total_length]``, all of one integer dtype.
        prompt_lens: Number of tokens of each sample before its response.
        group_keys: As in :func:`build_pack`.

    Returns:
        For each sample, its shared beginnings from the shortest to the longest; empty if it shares
        nothing.
    """
    found: list[list[Beginning]] = [[] for _ in arrays]
    groups: dict[Hashable, list[int]] = {}
    for i in range(len(arrays)):
        groups.setdefault(group_keys[i] if group_keys is not None else None, []).append(i)
    number = 0
    for group in groups.values():
        for length, members in _inner_nodes(arrays, prompt_lens, group):
            for i in members:
                found[i].append(Beginning(number, length, len(members)))
            number += 1
    return found


def _inner_nodes(
    arrays: Sequence[np.ndarray], prompt_lens: Sequence[int], group: list[int]
) -> Iterator[tuple[int, list[int]]]:
    """Yield the length of each shared beginning and its samples, shorter ones before those that go
    on from them.
    """
    # Samples with a common beginning are neighbours in this order, so the first and the last one
    # tell what all share.
    open_nodes = [(sorted(group, key=lambda i: arrays[i].tobytes()), 0)] if len(group) > 1 else []
    while open_nodes:
        members, depth = open_nodes.pop()
        # Equal prompts are shared whatever their length; what goes beyond them only if it is long
        # enough to pay.
        common = _common_length(arrays[members[0]], arrays[members[-1]])
        prompts = Counter(length for i in members if depth < (length := prompt_lens[i]) <= common)
        prompt = max((length for length, uses in prompts.items() if uses > 1), default=depth)
        shared = common if common - prompt >= MIN_SHARED_TOKENS else prompt
        if shared > depth:
            yield shared, members
        # After the common part, the samples branch at their next token.
        rest = [i for i in members if len(arrays[i]) > common]
        for _, branch in groupby(rest, key=lambda i: int(arrays[i][common])):
            branch_members = list(branch)
            if len(branch_members) > 1:
                open_nodes.append((branch_members, shared))


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    return int(differ.argmax()) if differ.any() else size


class _Builder:
    """Collects the segments of a pack, and what is scored."""

    def __init__(self) -> None:
        self.size = 0
        self.tokens: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.kv_ranges: list[list[Range]] = []
        self.keys: list[np.ndarray] = []
        self.logit_index: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []

    def append(self, array: np.ndarray, first_position: int, before: list[Range]) -> Range:
        """Append a segment that attends to the rows ``before`` and to itself; return its rows. An
        empty response or an empty padding adds no segment.
        """
        rows = (self.size, self.size + len(array))
        if len(array):
            self.kv_ranges.append([*before, rows])
            positions = np.arange(first_position, first_position + len(array))
            self.add(array, positions, _indices(self.kv_ranges[-1]))
        return rows

    def add(self, tokens: np.ndarray, positions: np.ndarray, keys: np.ndarray) -> None:
        """Append a segment with the rows of its keys."""
        self.size += len(tokens)
        self.tokens.append(tokens)
        self.positions.append(positions)
        self.keys.append(keys)

    def finish(self, **fields: Any) -> PackLayout:
        """Return the pack; ``fields`` are those of the layout that the segments do not tell."""
        return PackLayout(
            tokens=np.concatenate(self.tokens),
            positions=np.concatenate(self.positions),
            cu_seqlens_q=_cumulative(self.tokens),
            cu_seqlens_k=_cumulative(self.keys),
            logit_index=np.concatenate(self.logit_index),
            targets=np.concatenate(self.targets),
            **fields,
        )


def distinct_scores(layout: PackLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Find the response tokens of a pack that several samples have in common, so that each is
    scored once.

    Returns:
        The rows and targets to score, int64 ``[U]``, and for each response token its position among
        them, int64 ``[R]``; None if that saves fewer than ``MIN_SHARED_TOKENS`` tokens.
    """
    if layout.kv_index is None:
        return None
    # One number for a row and its target, since numpy sorts numbers many times faster than pairs.
    pairs = layout.logit_index << 32 | layout.targets
    _, first, place = np.unique(pairs, return_index=True, return_inverse=True)
    if len(place) - len(first) < MIN_SHARED_TOKENS:
        return None
    return layout.logit_index[first], layout.targets[first], place


def _indices(ranges: list[Range]) -> np.ndarray:
    return np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in ranges])


def _cumulative(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.cumsum([0, *map(len, parts)], dtype=np.int32)


# --- context parallelism -------------------------------------------------------------------


def build_context_pack(
    tokens: Sequence[Sequence[int] | np.ndarray],
    response_lengths: Sequence[int],
    size: int,
    rank: int,
    pad_to_multiple: int = 1,
) -> PackLayout:
    """Lay out the part of rank ``rank`` in a pack of n samples that is split over ``size``
    context-parallel ranks.

    Every sample is padded to a multiple of 2·size tokens and split into 2·size chunks; rank r holds
    chunks r and 2·size−1−r. With causal attention, a later chunk computes more scores, and these
    pairs have equal sums. A chunk attends to the sample's tokens up to its own end, with keys and
    values gathered from all ranks. So it is causal and aligned at the bottom right, like every
    segment.

    Labels are shifted before the split: a response token belongs to the rank that holds the token
    before it, whose logits score it. ``kv_index`` points into the concatenated rows of all ranks,
    ``[size · T]``. ``response_lengths`` counts the response tokens that this rank scores, and
    ``response_index`` says which ones of each sample they are.

    Args:
        pad_to_multiple: The number of tokens of each rank is padded to a multiple of this.
    """
    arrays = [np.asarray(t, dtype=np.int64) for t in tokens]
    # Every rank holds two chunks of each sample, so all ranks have as many rows.
    halves = [-(-len(array) // (2 * size)) for array in arrays]
    num_padding = -2 * sum(halves) % pad_to_multiple
    rows = 2 * sum(halves) + num_padding
    builder = _Builder()
    response_index, whole_samples, sample_ranges = [], [], []
    for array, half, response in zip(arrays, halves, response_lengths, strict=True):
        start = builder.size
        padded = np.concatenate([array, np.zeros(2 * size * half - len(array), np.int64)])
        whole = _rows_of_all(np.arange(len(padded)), half, start, size, rows)
        whole_samples.append(whole[: len(array)])
        chunks = [np.arange(c * half, (c + 1) * half) for c in (rank, 2 * size - 1 - rank)]
        for chunk in chunks:
            builder.add(padded[chunk], chunk, whole[: chunk[-1] + 1])
        sample_ranges.append([(start, builder.size)])
        # Positions from the last prompt token to the last but one token score the response. The
        # padding scores nothing.
        own = np.concatenate(chunks)
        first = len(array) - response - 1
        scored = np.flatnonzero((own >= first) & (own < len(array) - 1))
        builder.logit_index.append(scored + start)
        builder.targets.append(array[own[scored] + 1])
        response_index.append(own[scored] - first)
    if num_padding:  # It only attends to itself.
        places = np.arange(num_padding)
        builder.add(np.zeros(num_padding, np.int64), places, rank * rows + builder.size + places)
    return builder.finish(
        kv_ranges=[],
        kv_index=np.concatenate(builder.keys),
        response_lengths=[len(x) for x in response_index],
        sample_ranges=sample_ranges,
        response_index=response_index,
        whole_samples=whole_samples,
    )


def rows_of_rank(whole: PackLayout, size: int, rank: int) -> PackLayout:
    """Return the part of rank ``rank`` in a pack whose rows are divided in their order among
    ``size`` context-parallel ranks, which must divide their number.

    A response token belongs to the rank that holds the row whose logits score it. The fields of the
    segments stay those of the whole pack.
    """
    rows = len(whole.tokens) // size
    first, end = rank * rows, (rank + 1) * rows
    own = (whole.logit_index >= first) & (whole.logit_index < end)
    of_samples = np.split(own, np.cumsum(whole.response_lengths)[:-1])
    response_index = [np.flatnonzero(scored) for scored in of_samples]
    return replace(
        whole,
        tokens=whole.tokens[first:end],
        positions=whole.positions[first:end],
        logit_index=whole.logit_index[own] - first,
        targets=whole.targets[own],
        response_lengths=[len(x) for x in response_index],
        response_index=response_index,
        sample_ranges=[
            [(min(max(x - first, 0), rows), min(max(y - first, 0), rows)) for x, y in ranges]
            for ranges in whole.sample_ranges
        ],
    )


def _rows_of_all(positions: np.ndarray, half: int, start: int, size: int, rows: int) -> np.ndarray:
    """The rows of one sample's tokens after the rows of all ranks were concatenated."""
    chunk = positions // half
    second = chunk >= size
    owner = np.where(second, 2 * size - 1 - chunk, chunk)
    return owner * rows + start + np.where(second, half, 0) + positions % half
