"""A set of integers that are mostly dense."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

_INFINITE = 2**62


class Numbers:
    """A set of integers, stored as sorted, disjoint intervals ``[first, end)``. It is small if
    numbers are dense.
    """

    def __init__(self, intervals: Iterable[Sequence[int]] = ()) -> None:
        self.intervals = [[int(first), int(end)] for first, end in intervals]

    def __contains__(self, number: int) -> bool:
        place = bisect.bisect_right(self.intervals, [number, _INFINITE]) - 1
        return place >= 0 and number < self.intervals[place][1]

    def __len__(self) -> int:
        return sum(end - first for first, end in self.intervals)

    def add(self, number: int) -> None:
        if number in self:
            return
        place = bisect.bisect_right(self.intervals, [number, _INFINITE])
        # The number may close the gap between two intervals, extend one of them, or begin its own.
        joins_left = place > 0 and self.intervals[place - 1][1] == number
        joins_right = place < len(self.intervals) and self.intervals[place][0] == number + 1
        if joins_left and joins_right:
            self.intervals[place - 1][1] = self.intervals.pop(place)[1]
        elif joins_left:
            self.intervals[place - 1][1] = number + 1
        elif joins_right:
            self.intervals[place][0] = number
        else:
            self.intervals.insert(place, [number, number + 1])

    def remove(self, number: int) -> None:
        place = bisect.bisect_right(self.intervals, [number, _INFINITE]) - 1
        if place < 0 or number >= self.intervals[place][1]:
            return
        # The interval falls into the parts before and after the number, either of which may be
        # empty.
        first, end = self.intervals.pop(place)
        parts = [[first, number], [number + 1, end]]
        self.intervals[place:place] = [part for part in parts if part[0] < part[1]]

    def missing_in(self, other: Numbers) -> list[int]:
        """Return the numbers of this set that are not in ``other``."""
        missing: list[int] = []
        for first, end in self.intervals:
            at = first
            while at < end:
                place = bisect.bisect_right(other.intervals, [at, _INFINITE])
                if place and at < other.intervals[place - 1][1]:
                    # ``other`` has these numbers: skip to the end of its interval.
                    at = other.intervals[place - 1][1]
                    continue
                until = min(end, other.intervals[place][0] if place < len(other.intervals) else end)
                missing += range(at, until)
                at = until
        return missing
