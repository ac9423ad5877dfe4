"""Splitting weighted items into balanced parts: Karmarkar-Karp differencing, longest-first, first-fit."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence


def karmarkar_karp(weights: Sequence[float], parts: int, equal_counts: bool = False) -> list[list[int]]:
    """Split items into ``parts`` lists with sums as equal as the largest differencing method makes them.

    Args:
        weights: of the items, not negative.
        parts: number of lists.
        equal_counts: every list gets the same number of items; ``len(weights)`` must be a multiple.

    Returns:
        Lists of item positions in ascending order; the lists are in the order of their first item,
        empty ones last. The result depends on nothing but the arguments.

    Source: Karmarkar and Karp, "The differencing method of set partitioning" (1982), for k parts.
    """
    if parts < 1 or (equal_counts and len(weights) % parts):
        raise ValueError(f"cannot split {len(weights)} items into {parts} parts" + " of equal count" * equal_counts)
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    width = parts if equal_counts else 1
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for serial, start in enumerate(range(0, len(order), width)):
        sets = [(weights[i], [i]) for i in order[start : start + width]]
        sets += [(0.0, []) for _ in range(parts - len(sets))]
        heap.append(_state(sets, serial))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, serial, large = heapq.heappop(heap)
        _, _, small = heapq.heappop(heap)
        # The heaviest set of one meets the lightest of the other, so that their spreads cancel.
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(large, reversed(small), strict=True)]
        heapq.heappush(heap, _state(merged, serial))
    sets = heap[0][2] if heap else [(0.0, [])] * parts
    return sorted((sorted(items) for _, items in sets), key=lambda items: items[0] if items else len(weights))


def _state(sets: list[tuple[float, list[int]]], serial: int) -> tuple[float, int, list[tuple[float, list[int]]]]:
    """(minus the spread, a unique tie breaker, the sets from heavy to light)"""
    sets = sorted(sets, key=lambda s: (-s[0], s[1]))
    return (sets[-1][0] - sets[0][0], serial, sets)


def first_fit(weights: Sequence[float], cap: float) -> list[list[int]]:
    """Put each item, in order, into the first list whose sum stays within ``cap``; an item above it stays alone."""
    bins: list[list[int]] = []
    sums: list[float] = []
    for i, weight in enumerate(weights):
        for b, total in enumerate(sums):
            if total + weight <= cap:
                bins[b].append(i)
                sums[b] += weight
                break
        else:
            bins.append([i])
            sums.append(weight)
    return bins


def split_in_two(items: list[int], weight: Callable[[int], float]) -> tuple[list[int], list[int]]:
    """Two halves by longest-processing-time-first, each in ascending order; neither is empty for two or more items."""
    halves: tuple[list[int], list[int]] = ([], [])
    sums = [0.0, 0.0]
    for item in sorted(items, key=lambda i: (-weight(i), i)):
        lighter = 0 if not halves[0] or (halves[1] and sums[0] <= sums[1]) else 1
        halves[lighter].append(item)
        sums[lighter] += weight(item)
    return sorted(halves[0]), sorted(halves[1])
