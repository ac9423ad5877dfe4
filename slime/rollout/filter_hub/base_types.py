"""What a dynamic sampling filter answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slime.data.sample import Group

if TYPE_CHECKING:
    from slime.config.args import Args


@dataclass(frozen=True)
class DynamicFilterOutput:
    """``reason`` names a drop in ``rollout/dynamic_filter/drop_<reason>``. ``keep_when_insufficient``: a dropped
    group is kept after all when no more groups are under way than the rollout still needs."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Callable[..., object], args: Args, group: Group) -> DynamicFilterOutput:
    """Call ``fn(args, group)`` and accept a bare bool.

    Raises:
        TypeError: it returned something else (a coroutine, None).
    """
    answer = fn(args, group)
    if isinstance(answer, DynamicFilterOutput):
        return answer
    if not isinstance(answer, bool | np.bool_):
        name = getattr(fn, "__qualname__", fn)
        raise TypeError(f"dynamic sampling filter {name} returned {answer!r}, not a bool or DynamicFilterOutput")
    return DynamicFilterOutput(keep=bool(answer))
