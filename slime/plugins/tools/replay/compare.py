"""Compare a replayed step with what the run recorded of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slime.observability.run_state import SentWeights, digest_of_digests

ORDER = ("rollout/", "passrate/", "multi_turn/", "train/critic-", "train/")
"""Metrics in the order in which a step computes them, so that the first difference is the one closest to its cause."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 3e-3}
"""By ``--train-dtype``, the tolerance of a replay with other kernels or another layout."""
COUNTED = 0.02
"""The least tolerance, in the same replays, of a fraction of clipped tokens: a ratio at the bound of the clip may come
to lie on its other side."""


@dataclass(frozen=True)
class Difference:
    """A number that differs. ``recorded`` or ``replayed`` is None if it was not finite."""

    name: str
    recorded: float | None
    replayed: float | None

    @property
    def size(self) -> float:
        """The difference relative to the recorded value, or absolute if that is below 1."""
        if self.recorded is None or self.replayed is None:
            return math.inf
        return abs(self.recorded - self.replayed) / max(abs(self.recorded), 1.0)


@dataclass(frozen=True)
class MetricsCompared:
    """The metrics of a step, compared.

    Attributes:
        names: The metrics that both sides have, in the order of :data:`ORDER`.
        differences: Those beyond the tolerance, in the same order.
        largest: The largest difference, also within the tolerance; None if all are equal.
        missing: Metrics of the step that the run recorded and the replay does not compute, such as those of filters.
    """

    names: tuple[str, ...]
    differences: tuple[Difference, ...]
    largest: Difference | None
    missing: tuple[str, ...]


def compare_metrics(
    recorded: Mapping[str, float | None], replayed: Mapping[str, float], tolerance: float
) -> MetricsCompared:
    """Compare the metrics of a step, without those of times and memory.

    Args:
        tolerance: The difference that is allowed, relative to the recorded value or absolute below 1; 0 means that the
            numbers must be equal bit for bit.
    """
    kept = [name for name in recorded if name.startswith(ORDER) and not name.endswith("/step")]
    names = sorted((name for name in kept if name in replayed), key=_order)
    found = [Difference(name, recorded[name], _finite(replayed[name])) for name in names]
    unequal = [one for one in found if one.recorded != one.replayed]
    return MetricsCompared(
        tuple(names),
        tuple(one for one in unequal if one.size > _allowed(one.name, tolerance)),
        max(unequal, key=lambda one: one.size, default=None),
        tuple(sorted(name for name in kept if name not in replayed)),
    )


def _allowed(name: str, tolerance: float) -> float:
    return max(tolerance, COUNTED) if tolerance and name.endswith("clipfrac") else tolerance


def _order(name: str) -> tuple[int, str]:
    return next(place for place, prefix in enumerate(ORDER) if name.startswith(prefix)), name


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def matches(sent: SentWeights, digests: Mapping[str, str], frozen: Callable[[str], bool] | None) -> bool | None:
    """Return whether weights are those that were sent to the engines.

    The result is None if this cannot be decided, because the update had other tensors.

    Args:
        digests: By name, of all weights.
        frozen: Whether a tensor is frozen, so that an update may have left it out.
    """
    trained = {name: digest for name, digest in digests.items() if frozen is None or not frozen(name)}
    chosen = next((some for some in (digests, trained) if len(some) == sent.tensors), None)
    return None if chosen is None else digest_of_digests(chosen) == sent.digest


def first_unequal(recorded: Mapping[str, str], replayed: Mapping[str, str]) -> str | None:
    """Return the first name, in the order of the checkpoint, whose digests differ."""
    return next((name for name in recorded if recorded[name] != replayed.get(name)), None)
