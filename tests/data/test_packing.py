"""Packing: expanding a layout gives every sample back, with exactly the attention it would have alone."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.data.packing import PackLayout, build_pack

SampleSpec = tuple[int, list[int], list[int]]  # group, prompt, response
ids = st.integers(1, 3)  # few ids, so that prompts are often equal
sample_specs = st.lists(
    st.tuples(st.integers(0, 2), st.lists(ids, min_size=1, max_size=3), st.lists(ids, max_size=4)),
    min_size=1,
    max_size=7,
)


def attention_sets(layout: PackLayout) -> dict[int, list[int]]:
    """By brute force from what a kernel gets: for each query row the rows whose keys it sees, in order."""
    kv_index = np.arange(len(layout.tokens)) if layout.kv_index is None else layout.kv_index
    seen = {}
    for s in range(len(layout.q_lens)):
        q0, q1 = layout.cu_seqlens_q[s : s + 2]
        k0, k1 = layout.cu_seqlens_k[s : s + 2]
        keys = kv_index[k0:k1].tolist()
        for i in range(q1 - q0):
            seen[int(q0 + i)] = keys[: (k1 - k0) - (q1 - q0) + i + 1]  # bottom-right causal
    return seen


def layout_of(specs: list[SampleSpec], share: bool, pad: int = 1) -> PackLayout:
    keys: list[Hashable] = [group for group, _, _ in specs]
    return build_pack([p + r for _, p, r in specs], [len(r) for _, _, r in specs], keys, share, pad)


@given(sample_specs, st.booleans(), st.integers(1, 8))
def test_expanding_gives_every_sample_back(specs: list[SampleSpec], share: bool, pad: int) -> None:
    layout = layout_of(specs, share, pad)
    seen = attention_sets(layout)
    logits, targets = [], []
    for i, (_, prompt, response) in enumerate(specs):
        rows = layout.rows_of(i)
        assert layout.tokens[rows].tolist() == prompt + response
        assert layout.positions[rows].tolist() == list(range(len(rows)))
        for position, row in enumerate(rows.tolist()):
            assert seen[row] == rows[: position + 1].tolist(), "a token sees its own sample's past, no more, no less"
        logits += [int(rows[len(prompt) - 1 + t]) for t in range(len(response))]
        targets += response
    assert layout.logit_index.tolist() == logits and layout.targets.tolist() == targets
    assert layout.response_lengths == [len(r) for _, _, r in specs]


@given(sample_specs, st.booleans(), st.integers(1, 8))
def test_the_arrays_are_consistent(specs: list[SampleSpec], share: bool, pad: int) -> None:
    layout = layout_of(specs, share, pad)
    size = len(layout.tokens)
    assert size % pad == 0 and layout.num_padding < pad and len(layout.positions) == size
    rows = [row for start, n in zip(layout.q_starts, layout.q_lens, strict=True) for row in range(start, start + n)]
    assert rows == list(range(size)), "segments tile the pack"
    assert np.diff(layout.cu_seqlens_q).tolist() == layout.q_lens.tolist() and layout.q_lens.min() > 0
    k_lens = [sum(b - a for a, b in ranges) for ranges in layout.kv_ranges]
    assert np.diff(layout.cu_seqlens_k).tolist() == k_lens
    assert (layout.max_q, layout.max_k) == (layout.q_lens.max(), max(k_lens))
    assert layout.cu_seqlens_q.dtype == layout.cu_seqlens_k.dtype == np.int32
    if layout.kv_index is not None:
        assert layout.kv_index.tolist() == [r for ranges in layout.kv_ranges for a, b in ranges for r in range(a, b)]
    stored: dict[tuple[int, tuple[int, ...]], int] = {}
    for group, prompt, _ in specs:
        key = (group, tuple(prompt))
        stored[key] = stored.get(key, 0) + 1
    prompts = [len(p) * (1 if share else n) for (_, p), n in stored.items()]
    assert size - layout.num_padding == sum(prompts) + sum(len(r) for _, _, r in specs)


def test_a_group_stores_its_prompt_once() -> None:
    layout = layout_of([(0, [1, 2], [5, 6]), (0, [1, 2], [7]), (1, [1, 2], [8])], share=True)
    assert layout.tokens.tolist() == [1, 2, 5, 6, 7, 1, 2, 8]
    assert layout.positions.tolist() == [0, 1, 2, 3, 2, 0, 1, 2]
    assert layout.kv_ranges == [[(0, 2)], [(0, 2), (2, 4)], [(0, 2), (4, 5)], [(5, 8)]]
    assert layout.logit_index.tolist() == [1, 2, 1, 6]
    assert layout.cu_seqlens_q.tolist() == [0, 2, 4, 5, 8] and layout.cu_seqlens_k.tolist() == [0, 2, 6, 9, 12]


def test_nothing_to_share_needs_no_gather() -> None:
    assert layout_of([(0, [1], [2]), (1, [1], [3])], share=True).kv_index is None
    assert layout_of([(0, [1], [2]), (0, [1], [3])], share=False).kv_index is None
    by_prompt_alone = build_pack([[1, 2], [1, 3]], [1, 1], None, share_prompts=True)
    assert by_prompt_alone.tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        ([], [], "at least one sample"),
        ([[1, 2]], [2], "at least one prompt token"),
        ([[1, 2]], [1, 1], "1 samples, but 2 response lengths"),
    ],
)
def test_impossible_packs(tokens: list[list[int]], lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_pack(tokens, lengths)
