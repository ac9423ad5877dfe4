"""Packing: expanding a layout gives every sample back, with exactly the attention it would have
alone.
"""

from __future__ import annotations

from collections.abc import Hashable
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.data import packing
from slime.data.packing import (
    MIN_SHARED_TOKENS,
    PackLayout,
    build_context_pack,
    build_pack,
    rows_of_rank,
)

SampleSpec = tuple[int, list[int], list[int]]  # group, prompt, response
ids = st.integers(1, 3)  # few ids, so that prompts are often equal
sample_specs = st.lists(
    st.tuples(st.integers(0, 2), st.lists(ids, min_size=1, max_size=3), st.lists(ids, max_size=4)),
    min_size=1,
    max_size=7,
)


def attention_sets(layout: PackLayout) -> dict[int, list[int]]:
    """By brute force from what a kernel gets: for each query row the rows whose keys it sees, in
    order.
    """
    kv_index = np.arange(len(layout.tokens)) if layout.kv_index is None else layout.kv_index
    seen = {}
    for s in range(len(layout.q_lens)):
        q0, q1 = layout.cu_seqlens_q[s : s + 2]
        k0, k1 = layout.cu_seqlens_k[s : s + 2]
        keys = kv_index[k0:k1].tolist()
        for i in range(q1 - q0):
            seen[int(q0 + i)] = keys[: (k1 - k0) - (q1 - q0) + i + 1]  # bottom-right causal
    return seen


def layout_of(
    specs: list[SampleSpec], share: bool, pad: int = 1, smallest: int = MIN_SHARED_TOKENS
) -> PackLayout:
    """``smallest``: the number of tokens that a shared beginning must save per sample."""
    keys: list[Hashable] = [group for group, _, _ in specs]
    with mock.patch.object(packing, "MIN_SHARED_TOKENS", smallest):
        return build_pack(
            [p + r for _, p, r in specs], [len(r) for _, _, r in specs], keys, share, pad
        )


smallest_shared = st.sampled_from([1, 2, MIN_SHARED_TOKENS])


@given(sample_specs, st.booleans(), st.integers(1, 8), smallest_shared)
def test_expanding_gives_every_sample_back(
    specs: list[SampleSpec], share: bool, pad: int, smallest: int
) -> None:
    layout = layout_of(specs, share, pad, smallest)
    seen = attention_sets(layout)
    logits, targets = [], []
    for i, (_, prompt, response) in enumerate(specs):
        rows = layout.rows_of(i)
        assert layout.tokens[rows].tolist() == prompt + response
        assert layout.positions[rows].tolist() == list(range(len(rows)))
        for position, row in enumerate(rows.tolist()):
            assert seen[row] == rows[: position + 1].tolist(), (
                "a token sees its own sample's past, no more, no less"
            )
        logits += [int(rows[len(prompt) - 1 + t]) for t in range(len(response))]
        targets += response
    assert layout.logit_index.tolist() == logits and layout.targets.tolist() == targets
    assert layout.response_lengths == [len(r) for _, _, r in specs]


@given(sample_specs, st.booleans(), st.integers(1, 8), smallest_shared)
def test_the_arrays_are_consistent(
    specs: list[SampleSpec], share: bool, pad: int, smallest: int
) -> None:
    layout = layout_of(specs, share, pad, smallest)
    size = len(layout.tokens)
    stored = len({int(row) for i in range(len(specs)) for row in layout.rows_of(i)})
    assert size % pad == 0 and size - stored < pad and len(layout.positions) == size
    rows = [
        row
        for start, n in zip(layout.q_starts, layout.q_lens, strict=True)
        for row in range(start, start + n)
    ]
    assert rows == list(range(size)), "segments tile the pack"
    assert (
        np.diff(layout.cu_seqlens_q).tolist() == layout.q_lens.tolist() and layout.q_lens.min() > 0
    )
    k_lens = [sum(b - a for a, b in ranges) for ranges in layout.kv_ranges]
    assert np.diff(layout.cu_seqlens_k).tolist() == k_lens
    assert (layout.max_q, layout.max_k) == (layout.q_lens.max(), max(k_lens))
    assert layout.cu_seqlens_q.dtype == layout.cu_seqlens_k.dtype == np.int32
    if layout.kv_index is not None:
        assert layout.kv_index.tolist() == [
            r for ranges in layout.kv_ranges for a, b in ranges for r in range(a, b)
        ]
    copies = sum(len(p) + len(r) for _, p, r in specs)
    if not share:
        assert stored == copies
        return
    prompts = {(group, tuple(prompt)): len(prompt) for group, prompt, _ in specs}
    assert stored <= sum(prompts.values()) + sum(len(r) for _, _, r in specs), "equal prompts once"
    if smallest == 1:
        different = {
            (group, *(p + r)[:n]) for group, p, r in specs for n in range(1, len(p + r) + 1)
        }
        assert stored == len(different), "of equal beginnings every token once"


def test_a_group_stores_its_prompt_once() -> None:
    layout = layout_of([(0, [1, 2], [5, 6]), (0, [1, 2], [7]), (1, [1, 2], [8])], share=True)
    assert layout.tokens.tolist() == [1, 2, 5, 6, 7, 1, 2, 8]
    assert layout.positions.tolist() == [0, 1, 2, 3, 2, 0, 1, 2]
    assert layout.kv_ranges == [[(0, 2)], [(0, 2), (2, 4)], [(0, 2), (4, 5)], [(5, 8)]]
    assert layout.logit_index.tolist() == [1, 2, 1, 6]
    assert layout.cu_seqlens_q.tolist() == [0, 2, 4, 5, 8] and layout.cu_seqlens_k.tolist() == [
        0,
        2,
        6,
        9,
        12,
    ]


def test_the_branches_of_a_session_are_a_tree() -> None:
    """The branches have their first turns in common, two of them one turn more; another prompt
    shares its beginning.
    """
    system, first, second = (
        [1] * MIN_SHARED_TOKENS,
        [2] * MIN_SHARED_TOKENS,
        [3] * (MIN_SHARED_TOKENS + 1),
    )
    n, m = MIN_SHARED_TOKENS, MIN_SHARED_TOKENS + 1
    branches = [([*first, 7], 0), (first + second + [8, 9], 0), (first + second + [9], 0), ([6], 1)]
    layout = layout_of([(0, [*system, 5 + kind], turns) for turns, kind in branches], share=True)
    assert layout.tokens.tolist() == [*system, 5, *first, 7, *second, 8, 9, 9, 6, 6]
    trunk, turn, deeper = (0, n), (n, 2 * n + 1), (2 * n + 2, 2 * n + 2 + m)
    at = deeper[1]
    assert layout.kv_ranges == [
        [trunk], [trunk, turn], [trunk, turn, (2 * n + 1, 2 * n + 2)], [trunk, turn, deeper],
        [trunk, turn, deeper, (at, at + 2)], [trunk, turn, deeper, (at + 2, at + 3)], [trunk, (at + 3, at + 5)],
    ]  # fmt: skip
    short = [(0, [1, 2], [3] * (n - 1) + [4]), (0, [1, 2], [3] * (n - 1) + [5])]
    assert len(layout_of(short, share=True).tokens) == 2 + 2 * n, "it is not worth a segment"


def test_a_sample_between_two_alike_shares_only_what_it_has_in_common_with_them() -> None:
    """In the order of the samples, and in that of their first token ids alone, the two are no
    neighbours.
    """
    n = MIN_SHARED_TOKENS
    prompt, same = [1], [2] * n
    specs = [(0, prompt, [*same, 5]), (0, prompt, [3] * n), (0, prompt, [*same, 6])]
    layout = layout_of(specs, share=True)
    assert layout.tokens.tolist() == [1, *same, 5, *[3] * n, 6]
    rows = [
        [0, *range(1, n + 1), n + 1],
        [0, *range(n + 2, 2 * n + 2)],
        [0, *range(1, n + 1), 2 * n + 2],
    ]
    assert [layout.rows_of(i).tolist() for i in range(3)] == rows


def test_equal_scores_are_computed_once_and_no_others_are_taken_for_equal() -> None:
    n = 2 * MIN_SHARED_TOKENS
    same = [256 * (1 - i % 2) for i in range(n)]
    layout = layout_of([(0, [1], [*same, 5]), (0, [1], [*same, 6])], share=True)
    found = packing.distinct_scores(layout)
    assert found is not None
    rows, targets, place = found
    assert rows[place].tolist() == layout.logit_index.tolist()
    assert targets[place].tolist() == layout.targets.tolist()
    assert len(rows) == n + 2, "the beginning once, and the two ends"


def test_nothing_to_share_needs_no_gather() -> None:
    assert layout_of([(0, [1], [2]), (1, [1], [3])], share=True).kv_index is None
    assert layout_of([(0, [1], [2]), (0, [1], [3])], share=False).kv_index is None
    by_prompt_alone = build_pack([[1, 2], [1, 3]], [1, 1], None, share_prompts=True)
    assert by_prompt_alone.tokens.tolist() == [1, 2, 3]


SAMPLES = st.lists(
    st.integers(2, 20).flatmap(lambda total: st.tuples(st.just(total), st.integers(1, total - 1))),
    min_size=1,
    max_size=5,
)


def attended(
    layout: PackLayout, rows: list[tuple[int, int]]
) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """For each query the keys that it attends to, both as (sample, position).

    Attention is causal and aligned at the bottom right: query ``i`` of ``q`` sees the first ``k - q
    + i + 1`` keys.

    Args:
        rows: (sample, position) of every row that keys are gathered from.
    """
    found: dict[tuple[int, int], set[tuple[int, int]]] = {}
    keys = np.arange(len(rows)) if layout.kv_index is None else layout.kv_index
    for segment in range(len(layout.q_lens)):
        q_begin, q_end = layout.cu_seqlens_q[segment : segment + 2].tolist()
        k_begin, k_end = layout.cu_seqlens_k[segment : segment + 2].tolist()
        for i in range(q_end - q_begin):
            visible = keys[k_begin : k_end - (q_end - q_begin) + i + 1]
            query = rows[keys[k_end - (q_end - q_begin) + i]]
            found[query] = {rows[key] for key in visible}
    return found


def named_rows(layout: PackLayout, samples: int) -> list[tuple[int, int]]:
    """(sample, position) of every row of one rank; padding at the end of the pack is sample -1."""
    names = [(-1, -1)] * len(layout.tokens)
    for sample in range(samples):
        for row in layout.rows_of(sample):
            names[row] = (sample, int(layout.positions[row]))
    return names


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@given(samples=SAMPLES, shares=st.booleans())
def test_ranks_divide_the_rows_and_the_response_tokens_of_a_pack(
    size: int, samples: list[tuple[int, int]], shares: bool
) -> None:
    """The samples begin alike, so that some rows score a token of several of them."""
    tokens = [list(range(total)) for total, _ in samples]
    responses = [response for _, response in samples]
    whole = build_pack(tokens, responses, share_prompts=shares, pad_to_multiple=3 * size)
    parts = [rows_of_rank(whole, size, rank) for rank in range(size)]
    for name in ("tokens", "positions"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        assert joined.tolist() == getattr(whole, name).tolist()
    scored: list[list[tuple[int, int, int]]] = [[] for _ in samples]
    for rank, part in enumerate(parts):
        rows = part.logit_index + rank * len(part.tokens)
        assert part.response_index is not None and ((part.logit_index >= 0).all())
        ends = np.cumsum(part.response_lengths)[:-1]
        columns = (np.split(rows, ends), np.split(part.targets, ends), part.response_index)
        for sample, (own, targets, index) in enumerate(zip(*columns, strict=True)):
            scored[sample] += zip(index.tolist(), own.tolist(), targets.tolist(), strict=True)
        for sample in range(len(samples)):
            of_sample = part.rows_of(sample)
            assert part.tokens[of_sample].tolist() == part.positions[of_sample].tolist()
    ends = np.cumsum(responses)[:-1]
    wanted = zip(np.split(whole.logit_index, ends), np.split(whole.targets, ends), strict=True)
    for found, (own, targets) in zip(scored, wanted, strict=True):
        places = list(range(len(own)))
        assert sorted(found) == list(zip(places, own.tolist(), targets.tolist(), strict=True))
    assert sum(len(part.rows_of(i)) for part in parts for i in range(len(samples))) == sum(
        len(whole.rows_of(i)) for i in range(len(samples))
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@given(samples=SAMPLES, multiple=st.sampled_from([1, 4, 7]))
def test_all_ranks_together_are_the_pack_of_one(
    size: int, samples: list[tuple[int, int]], multiple: int
) -> None:
    tokens = [[1 + 100 * i + j for j in range(total)] for i, (total, _) in enumerate(samples)]
    responses = [response for _, response in samples]
    parts = [build_context_pack(tokens, responses, size, rank, multiple) for rank in range(size)]
    whole = build_pack(tokens, responses)
    count = len(samples)
    assert len({len(part.tokens) for part in parts}) == 1 and len(parts[0].tokens) % multiple == 0

    rows = [name for part in parts for name in named_rows(part, count)]
    ids = np.concatenate([part.tokens for part in parts])
    real = [(i, j) for i, (total, _) in enumerate(samples) for j in range(total)]
    of_name = {name: int(token) for name, token in zip(rows, ids, strict=True) if name in set(real)}
    assert of_name == {(i, j): tokens[i][j] for i, j in real}, "every token is on exactly one rank"
    assert sum(name in set(real) for name in rows) == len(real)

    expected = attended(whole, named_rows(whole, count))
    found: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for rank, part in enumerate(parts):
        own = rows[rank * len(part.tokens) : (rank + 1) * len(part.tokens)]
        seen = attended(part, rows)
        assert set(seen) == set(own), "a rank computes the queries of its own rows"
        found |= seen
    assert {name: found[name] for name in real} == {name: expected[name] for name in real}

    by_sample: list[dict[int, tuple[tuple[int, int], int]]] = [{} for _ in samples]
    for rank, part in enumerate(parts):
        own, at = rows[rank * len(part.tokens) : (rank + 1) * len(part.tokens)], 0
        assert part.response_index is not None
        for i, index in enumerate(part.response_index):
            assert part.response_lengths[i] == len(index)
            for position in index.tolist():
                assert position not in by_sample[i], "a response token is scored once"
                by_sample[i][position] = own[part.logit_index[at]], int(part.targets[at])
                at += 1
        assert at == len(part.logit_index) == len(part.targets)
    for i, (total, response) in enumerate(samples):
        first = total - response
        scored = {k: ((i, first + k - 1), tokens[i][first + k]) for k in range(response)}
        assert by_sample[i] == scored, "by the row of the token before it"
