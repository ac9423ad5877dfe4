"""Drafts on paper: passes counted by hand."""

from __future__ import annotations

from drafts import passes_of, propose


def test_the_newest_of_the_longest_matches_is_proposed() -> None:
    known = [[1, 2, 3, 4], [9, 2, 3, 5], [1, 2, 3, 6]]
    assert propose([1, 2, 3], known, 2, 8) == [6]
    assert propose([9, 2, 3], known, 2, 8) == [5]
    assert propose([7, 3], known, 2, 8) == []
    assert propose([1, 2], known, 2, 1) == [3]


def test_passes_are_those_counted_by_hand() -> None:
    response = [1, 2, 3, 4, 5, 6, 7, 8]
    assert passes_of([response], [], 2, 8) == [8]
    # Two tokens must be there before anything matches; then the rest comes at once.
    assert passes_of([response], [response], 2, 8) == [3]
    assert passes_of([response], [response], 2, 3) == [4]
    # A draft that is wrong costs nothing: its pass still gives a token.
    assert passes_of([response], [[1, 2, 9, 9, 9]], 2, 8) == [8]
    # Siblings that go together can only learn from what is already written.
    assert passes_of([response, response], [], 2, 8) == [8, 8]
    assert passes_of([[1, 2, 1, 2, 1, 2, 1, 2]], [], 2, 8) == [6]
