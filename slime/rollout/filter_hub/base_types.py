"""The return type of dynamic sampling filters, and the call of a filter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slime.data.sample import Group
from slime.rollout.base_types import function_name

if TYPE_CHECKING:
    from slime.config.args import Args


@dataclass
class DynamicFilterOutput:
    """The decision of a filter on one group.

    Attributes:
        keep: Whether to keep the group.
        reason: Name of the reason for a drop, for the metric
            ``rollout/dynamic_filter/drop_<reason>``.
        keep_when_insufficient: Keep a dropped group nevertheless if the rollout has no more groups
            in flight than it still needs. The fully asynchronous rollout replaces each dropped
            group; it keeps such a group once the rollout has dropped as many as its buffer holds.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Callable[..., object], args: Args, group: Group) -> DynamicFilterOutput:
    """Call ``fn(args, group)``. The filter may return a bool or a :class:`DynamicFilterOutput`.

    Raises:
        TypeError: The filter returned something else, such as a coroutine or None.
    """
    answer = fn(args, group)
    if isinstance(answer, DynamicFilterOutput):
        return answer
    if not isinstance(answer, bool | np.bool_):
        raise TypeError(
            f"dynamic sampling filter {function_name(fn)} returned {answer!r}, not a bool or "
            "DynamicFilterOutput"
        )
    return DynamicFilterOutput(keep=bool(answer))


class MetricGatherer:
    """Counts the groups that filters dropped, for rollout functions that call filters
    themselves.
    """

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count one dropped group. A drop without a reason is not counted."""
        if reason:
            self._dropped[reason] += 1

    def collect(self) -> dict[str, int]:
        """Return ``rollout/dynamic_filter/drop_<reason>`` for each reason."""
        return {
            f"rollout/dynamic_filter/drop_{reason}": count
            for reason, count in sorted(self._dropped.items())
        }
