"""A pseudo-random permutation that is computed entry by entry, so that it needs no memory however long it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slime.config.seeds import derive_seed

_ROUNDS = 8
_Words = np.ndarray  # uint64


def shuffled(positions: Sequence[int] | range, count: int, seed: int) -> list[int]:
    """Return the entries at these positions of a random permutation of ``range(count)``.

    The permutation is a Feistel network over the smallest power of four, 4^k >= count. A value outside of the range
    goes through the network again until it falls inside. The network is a bijection, so no two positions meet in one
    value. Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", cycle-walking.

    Args:
        seed: Seed of the permutation, which depends only on it and on ``count``.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = [np.uint64(derive_seed(seed, "feistel", i)) for i in range(_ROUNDS)]
    values = _network(np.asarray(positions, np.uint64), half, mask, keys)
    outside = values >= count
    while outside.any():
        values[outside] = _network(values[outside], half, mask, keys)
        outside = values >= count
    return [int(value) for value in values]


def _network(values: _Words, half: np.uint64, mask: np.uint64, keys: list[np.uint64]) -> _Words:
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + (key << np.uint64(32))) & mask)
    return (left << half) | right


def _mixed(words: _Words) -> _Words:
    """splitmix64's finalizer; multiplication wraps. Source: Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
