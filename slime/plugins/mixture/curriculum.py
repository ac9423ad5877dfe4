"""Curricula by pass rate: how often the prompts of each data set, and of each row, were solved."""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from slime.data.sample import Sample

WINDOW = 32
"""The pass rate of a data set is that of so many of its newest groups."""
ROW = "mixture_row"
"""The key of ``Sample.metadata`` with the row of a sample, of a data set with ``pass_rate``."""


def row_of(prompt: Sample) -> str:
    """Return a name of a row that depends on its prompt and label only."""
    text = json.dumps([prompt.prompt, prompt.label], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass
class PassRates:
    """The pass rates of one data set. They do not depend on the order in which groups are judged.

    Attributes:
        newest: The number and the pass rate of each of the :data:`WINDOW` newest groups.
        rows: The pass rate of each row when it came last, with the number of its group.
    """

    newest: list[tuple[int, float]] = field(default_factory=list)
    rows: dict[str, tuple[int, float]] = field(default_factory=dict)

    def add(self, group: int, rate: float, row: str | None) -> None:
        """Add a judged group."""
        bisect.insort(self.newest, (group, rate))
        del self.newest[:-WINDOW]
        if row is not None:
            self.rows[row] = max(self.rows.get(row, (-1, 0.0)), (group, rate))

    def has_reached(self, rate: float) -> bool:
        """Return whether the mean of the newest groups is at least this, and their number enough."""
        return len(self.newest) == WINDOW and fmean(one for _, one in self.newest) >= rate

    def allows(self, row: str, bounds: Sequence[float]) -> bool:
        """Return whether a row is within the bounds, or has not come yet."""
        known = self.rows.get(row)
        return known is None or bounds[0] <= known[1] <= bounds[1]

    def state_dict(self) -> dict[str, Any]:
        return {"newest": list(self.newest), "rows": dict(self.rows)}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> PassRates:
        """The inverse of :meth:`state_dict`."""
        rows = {row: (int(group), float(rate)) for row, (group, rate) in state["rows"].items()}
        return cls([(int(group), float(rate)) for group, rate in state["newest"]], rows)
