"""The sequences of a pack are dealt out among the ranks of context parallelism."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from slime.models.segments import deal_sequences


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 5))
def test_each_sequence_goes_to_one_rank_and_ranks_get_about_equal_numbers_of_tokens(
    lens: list[int], ranks: int
) -> None:
    hands = deal_sequences(lens, ranks)
    assert len(hands) == ranks
    assert sorted(chain(*hands)) == list(range(len(lens)))
    tokens = [sum(lens[i] for i in hand) for hand in hands]
    assert max(tokens) - min(tokens) <= max(lens)
