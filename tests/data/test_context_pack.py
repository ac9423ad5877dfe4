"""A pack cut over context-parallel ranks holds, over all ranks, exactly what the pack of one rank holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.data.context_pack import build_context_pack
from slime.data.packing import PackLayout, build_pack

SAMPLES = st.lists(
    st.integers(2, 20).flatmap(lambda total: st.tuples(st.just(total), st.integers(1, total - 1))),
    min_size=1,
    max_size=5,
)


def attended(layout: PackLayout, rows: list[tuple[int, int]]) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """For each query the keys that it attends to, both as (sample, position).

    Attention is causal and aligned at the bottom right: query ``i`` of ``q`` sees the first ``k - q + i + 1`` keys.

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
@given(samples=SAMPLES, multiple=st.sampled_from([1, 4, 7]))
def test_all_ranks_together_are_the_pack_of_one(size: int, samples: list[tuple[int, int]], multiple: int) -> None:
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
