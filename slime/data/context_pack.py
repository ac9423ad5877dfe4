"""A pack split over context-parallel ranks such that all of them compute about the same number of attention scores.

Every sample is padded to a multiple of 2·cp tokens and split into 2·cp chunks; rank r holds chunks r and 2·cp−1−r. With
causal attention, a later chunk computes more scores, and these pairs have equal sums. A chunk attends to the sample's
tokens up to its own end, with keys and values gathered from all ranks. So it is causal and aligned at the bottom right,
like every segment of :mod:`slime.data.packing`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from slime.data.packing import PackLayout


def build_context_pack(
    tokens: Sequence[Sequence[int] | np.ndarray],
    response_lengths: Sequence[int],
    size: int,
    rank: int,
    pad_to_multiple: int = 1,
) -> PackLayout:
    """Lay out the part of rank ``rank`` in a pack of n samples that is split over ``size`` ranks.

    Labels are shifted before the split: a response token belongs to the rank that holds the token before it, whose
    logits score it. ``kv_index`` points into the concatenated rows of all ranks, ``[size · T]``. ``response_lengths``
    counts the response tokens that this rank scores, and ``response_index`` says which ones of each sample they are.

    Args:
        pad_to_multiple: The number of tokens of each rank is padded to a multiple of this.
    """
    arrays = [np.asarray(t, dtype=np.int64) for t in tokens]
    # Every rank holds two chunks of each sample, so the layout of the rows is the same on all ranks.
    halves = [-(-len(array) // (2 * size)) for array in arrays]
    count = 2 * sum(halves)
    num_padding = -count % pad_to_multiple
    rows = count + num_padding
    starts = np.concatenate([[0], np.cumsum([2 * half for half in halves])])
    ids, positions, q_lens, keys = [], [], [], []
    logit_index, targets, response_index, whole_samples = [], [], [], []
    for array, half, start, response in zip(arrays, halves, starts, response_lengths, strict=False):
        padded = np.concatenate([array, np.zeros(2 * size * half - len(array), np.int64)])
        whole = _rows_of_all(np.arange(len(padded)), half, int(start), size, rows)
        whole_samples.append(whole[: len(array)])
        mine = []
        for chunk in (rank, 2 * size - 1 - rank):
            mine.append(np.arange(chunk * half, (chunk + 1) * half))
            q_lens.append(half)
            keys.append(whole[: (chunk + 1) * half])
        own = np.concatenate(mine)
        ids.append(padded[own])
        positions.append(own)
        # Positions from the last prompt token to the last but one token score the response. The padding scores nothing.
        first = len(array) - response - 1
        scored = np.flatnonzero((own >= first) & (own < len(array) - 1))
        logit_index.append(scored + start)
        targets.append(array[own[scored] + 1])
        response_index.append(own[scored] - first)
    if num_padding:
        ids.append(np.zeros(num_padding, np.int64))
        positions.append(np.arange(num_padding))
        q_lens.append(num_padding)
        keys.append(rank * rows + count + np.arange(num_padding))  # Padding only attends to itself.
    lens, k_lens = np.asarray(q_lens, np.int64), np.asarray([len(k) for k in keys], np.int64)
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (lens, k_lens))
    return PackLayout(
        tokens=np.concatenate(ids),
        positions=np.concatenate(positions),
        q_starts=cu_q[:-1].astype(np.int64),
        q_lens=lens,
        kv_ranges=[],
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        kv_index=np.concatenate(keys),
        max_q=int(lens.max()),
        max_k=int(k_lens.max()),
        logit_index=np.concatenate(logit_index),
        targets=np.concatenate(targets),
        response_lengths=[len(x) for x in response_index],
        num_padding=num_padding,
        sample_ranges=[[(int(a), int(b))] for a, b in itertools.pairwise(starts)],
        response_index=response_index,
        whole_samples=whole_samples,
    )


def _rows_of_all(positions: np.ndarray, half: int, start: int, size: int, rows: int) -> np.ndarray:
    """The rows of one sample's tokens after the rows of all ranks were concatenated."""
    chunk = positions // half
    second = chunk >= size
    owner = np.where(second, 2 * size - 1 - chunk, chunk)
    return owner * rows + start + np.where(second, half, 0) + positions % half
