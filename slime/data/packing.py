"""The layout of a micro-batch whose samples are packed into one row, without padding between them.

A pack is a sequence of *segments*. Without sharing, a segment is one whole sample. With sharing, samples of a group
that have the same prompt store it once, as a segment of its own. Each of their responses is a segment whose queries
attend to the keys and values of the prompt and then to their own. In both cases, attention is causal and aligned at the
bottom right: query ``i`` of ``q`` attends to the first ``k - q + i + 1`` of the segment's ``k`` keys. Varlen attention
kernels compute exactly this from ``cu_seqlens_q`` and ``cu_seqlens_k`` after keys and values were gathered with
``kv_index``.

The layout is plain numpy, so it can be tested without a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

Range = tuple[int, int]


@dataclass(frozen=True)
class PackLayout:
    """The layout of ``n`` samples as ``T`` tokens in ``S`` segments with ``R`` response tokens.

    ================ ============= ==========================================================
    field            shape, type   meaning
    ================ ============= ==========================================================
    tokens           int64 [T]     token ids; padding is 0
    positions        int64 [T]     position of the token in its sample (or shared prompt)
    q_starts, q_lens int64 [S]     first row and number of rows of each segment
    kv_ranges        S lists       per segment, the ``(start, end)`` rows that hold its keys,
                                   in order: the shared prompt, if any, then its own rows
    cu_seqlens_q     int32 [S+1]   cumulative q_lens
    cu_seqlens_k     int32 [S+1]   cumulative numbers of keys
    kv_index         int64 [K]     rows from which keys and values are gathered; None without
                                   sharing, since keys then have the order of the queries
    max_q, max_k     int           longest segment in queries and in keys
    logit_index      int64 [R]     row whose logits score each response token, samples in order
    targets          int64 [R]     ids of the response tokens
    response_lengths list, n       as given
    num_padding      int           padding tokens at the end, which form a segment
    sample_ranges    n lists       per sample, the ``(start, end)`` rows that hold its tokens
    response_index   list, n       with context parallelism (``context_pack.py``): which of a
                                   sample's response tokens this rank scores; otherwise None
    ================ ============= ==========================================================
    """

    tokens: np.ndarray
    positions: np.ndarray
    q_starts: np.ndarray
    q_lens: np.ndarray
    kv_ranges: list[list[Range]]
    cu_seqlens_q: np.ndarray
    cu_seqlens_k: np.ndarray
    kv_index: np.ndarray | None
    max_q: int
    max_k: int
    logit_index: np.ndarray
    targets: np.ndarray
    response_lengths: list[int]
    num_padding: int
    sample_ranges: list[list[Range]]
    response_index: list[np.ndarray] | None = None

    def rows_of(self, sample: int) -> np.ndarray:
        """The rows of the pack that hold the tokens of one sample, in order: int64 [total_length]."""
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
        tokens: Prompt + response ids of each sample, as lists, arrays or CPU tensors.
        response_lengths: Number of tokens at the end of each sample that are its response.
        group_keys: Only samples with equal keys may share a prompt. None: all samples with equal prompts may.
        share_prompts: Whether equal prompts (``tokens[:total - response]``) of a group are stored once.
        pad_to_multiple: The number of tokens is padded to a multiple of this.

    Raises:
        ValueError: There are no samples, or one has no prompt token, from which its first response token is predicted.
    """
    arrays = [np.asarray(t, dtype=np.int64) for t in tokens]
    _check(arrays, response_lengths, group_keys, pad_to_multiple)
    builder = _Builder()
    prompt_lens = [len(t) - r for t, r in zip(arrays, response_lengths, strict=True)]
    if share_prompts:
        keys = group_keys if group_keys is not None else [None] * len(arrays)
        prompts = [(k, t[:p].tobytes()) for k, t, p in zip(keys, arrays, prompt_lens, strict=True)]
        # A prompt that only one sample has stays in one segment with its response. If no prompt is shared, keys need no
        # gathering.
        uses = Counter(prompts)
        for array, prompt_len, prompt in zip(arrays, prompt_lens, prompts, strict=True):
            builder.add(array, prompt_len, prompt if uses[prompt] > 1 else None)
    else:
        for array, prompt_len in zip(arrays, prompt_lens, strict=True):
            builder.add(array, prompt_len, None)
    return builder.finish(list(map(int, response_lengths)), pad_to_multiple)


class _Builder:
    def __init__(self) -> None:
        self.size = 0
        self.tokens: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.segments: list[Range] = []
        self.kv_ranges: list[list[Range]] = []
        self.shared: dict[Hashable, Range] = {}
        self.sample_ranges: list[list[Range]] = []
        self.logit_index: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []

    def add(self, array: np.ndarray, prompt_len: int, prompt_key: Hashable | None) -> None:
        if prompt_key is None:
            start, end = self._segment(array, 0, [])
            self.sample_ranges.append([(start, end)])
            # The logits of a row predict the next token, so the rows begin one before the response and end one early.
            self.logit_index.append(np.arange(start + prompt_len - 1, end - 1))
        else:
            if prompt_key not in self.shared:
                self.shared[prompt_key] = self._segment(array[:prompt_len], 0, [])
            prompt = self.shared[prompt_key]
            own = self._segment(array[prompt_len:], prompt_len, [prompt])
            self.sample_ranges.append([prompt, own])
            # The last row of the shared prompt scores the first response token of all its samples. Every other response
            # token is scored by the row of the token before it.
            self.logit_index.append(_indices([prompt, own])[prompt_len - 1 : -1])
        self.targets.append(array[prompt_len:])

    def _segment(self, array: np.ndarray, first_position: int, before: list[Range]) -> Range:
        # An empty response or an empty padding adds no segment.
        rows = (self.size, self.size + len(array))
        if len(array):
            self.size = rows[1]
            self.tokens.append(array)
            self.positions.append(np.arange(first_position, first_position + len(array)))
            self.segments.append(rows)
            self.kv_ranges.append([*before, rows])
        return rows

    def finish(self, response_lengths: list[int], pad_to_multiple: int) -> PackLayout:
        num_padding = -self.size % pad_to_multiple
        self._segment(np.zeros(num_padding, np.int64), 0, [])
        starts, ends = np.asarray(self.segments, np.int64).T
        k_lens = np.asarray([sum(b - a for a, b in ranges) for ranges in self.kv_ranges], np.int64)
        return PackLayout(
            tokens=np.concatenate(self.tokens),
            positions=np.concatenate(self.positions),
            q_starts=starts,
            q_lens=ends - starts,
            kv_ranges=self.kv_ranges,
            cu_seqlens_q=_cumulative(ends - starts),
            cu_seqlens_k=_cumulative(k_lens),
            kv_index=np.concatenate([_indices(ranges) for ranges in self.kv_ranges]) if self.shared else None,
            max_q=int((ends - starts).max()),
            max_k=int(k_lens.max()),
            logit_index=np.concatenate(self.logit_index),
            targets=np.concatenate(self.targets),
            response_lengths=response_lengths,
            num_padding=num_padding,
            sample_ranges=self.sample_ranges,
        )


def _check(
    arrays: list[np.ndarray],
    response_lengths: Sequence[int],
    group_keys: Sequence[Hashable] | None,
    pad_to_multiple: int,
) -> None:
    if not arrays:
        raise ValueError("a pack needs at least one sample")
    if len(response_lengths) != len(arrays) or (group_keys is not None and len(group_keys) != len(arrays)):
        keys = "" if group_keys is None else f", {len(group_keys)} group keys"
        raise ValueError(f"{len(arrays)} samples, but {len(response_lengths)} response lengths{keys}")
    if pad_to_multiple < 1:
        raise ValueError(f"pad_to_multiple is {pad_to_multiple}, must be at least 1")
    for i, (array, response) in enumerate(zip(arrays, response_lengths, strict=True)):
        if not 0 <= response < len(array):
            raise ValueError(
                f"sample {i} of the pack has {len(array)} tokens and response length {response}: "
                "it needs at least one prompt token before the response"
            )


def _indices(ranges: list[Range]) -> np.ndarray:
    return np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in ranges])


def _cumulative(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
