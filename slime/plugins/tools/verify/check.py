"""Compare a backend and layout with the reference, and say where they differ first."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.plugins.tools.verify.places import in_order, parts_of
from slime.plugins.tools.verify.reference import Scores

LOG_PROB = 2e-4
"""Allowed absolute difference of a log-prob in float32."""
LOSS = 2e-5
GRADIENT = 1e-3
"""Allowed norm of the difference of a parameter's gradient, relative to the norm of its gradient."""
NEGLIGIBLE = 1e-5
"""Gradients are compared in full only above this fraction of the norm of the whole gradient: below, they are rounding
(that of a key's bias is 0)."""


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Attributes:
        what: What was compared.
        good: Whether it is within the tolerance.
        largest: The largest difference, in the unit of ``allowed``.
        first: The first name, in the order of the checkpoint, that differs; empty if nothing does.
        note: What the difference means.
    """

    what: str
    good: bool
    largest: float
    allowed: float
    first: str = ""
    note: str = ""


def check_round_trip(expected: Mapping[str, Tensor], ranks: Sequence[Scores]) -> Check:
    """Compare the weights that a backend has loaded and gathered again with those of the checkpoint, bit for bit."""
    for number, rank in enumerate(ranks):
        for name, tensor in expected.items():
            mine = rank.weights.get(name)
            if mine is None or mine.shape != tensor.shape or not torch.equal(mine, tensor):
                why = "is missing" if mine is None else "has other values"
                far = math.inf if mine is None or mine.shape != tensor.shape else _largest(mine - tensor)
                return Check("weights round trip", False, far, 0.0, name, f"it {why} on rank {number}")
        if extra := [name for name in rank.weights if name not in expected]:
            return Check("weights round trip", False, math.inf, 0.0, extra[0], "the checkpoint has no such tensor")
    return Check("weights round trip", True, 0.0, 0.0)


def check_log_probs(expected: Mapping[int, Tensor], found: Sequence[Mapping[int, Tensor]], what: str) -> Check:
    """Compare log-probs of all samples. ``found`` has those of each rank, which may be of a part of the samples."""
    worst, where = 0.0, ""
    for number, rank in enumerate(found):
        for position, mine in rank.items():
            far = _nan_last(_largest(mine - expected[position]))
            if far > worst:
                worst, where = far, f"sample {position} on rank {number}"
    missing = set(expected) - {position for rank in found for position in rank}
    if missing:
        return Check(what, False, math.inf, LOG_PROB, note=f"no rank scored sample {min(missing)}")
    good = worst <= LOG_PROB
    return Check(what, good, worst, LOG_PROB, note="" if good else f"the most in {where}")


def check_loss(expected: Scores, ranks: Sequence[Scores]) -> Check:
    worst = max((abs(rank.loss - expected.loss) for rank in ranks), key=_nan_last)
    return Check("loss", worst <= LOSS, worst, LOSS)


def check_gradients(expected: Scores, ranks: Sequence[Scores]) -> Check:
    """Compare the gradient of each parameter on each rank, and classify what differs."""
    worst = 0.0
    wrong: dict[str, int] = {}
    ratios: list[float | None] = []
    least = NEGLIGIBLE * expected.grad_norm
    for number, rank in enumerate(ranks):
        for name, theirs in expected.gradients.items():
            mine = rank.gradients.get(name)
            if mine is None or mine.shape != theirs.shape:
                wrong.setdefault(name, number)
                continue
            far = float((mine - theirs).double().norm()) / max(float(theirs.double().norm()), least)
            worst = max(worst, far, key=_nan_last)
            if not far <= GRADIENT:
                wrong.setdefault(name, number)
                ratios.append(_ratio(mine, theirs))
    if not wrong:
        return Check("gradients", True, worst, GRADIENT)
    first = next(name for name in expected.gradients if name in wrong)
    trained = [name for name, g in expected.gradients.items() if float(g.double().norm()) > least]
    note = f"{len(wrong)} of {len(expected.gradients)} parameters differ, the first on rank {wrong[first]}"
    if set(trained) <= set(wrong):
        note += ": all of them, so look at the sum of gradients over data-parallel ranks and at the divisor of the loss"
        known = [ratio for ratio in ratios if ratio is not None]
        if known and len(known) == len(ratios) and max(known) - min(known) < 1e-2 * abs(known[0]):
            note += f" (each is {known[0]:.4g} times the right one)"
    else:
        note += ": a sum over tensor-, sequence- or context-parallel ranks is missing there, or its backward is wrong"
        note += f"; in the backward pass, {', '.join(_begin_of_error(wrong, expected.gradients))} differ first"
    return Check("gradients", False, worst, GRADIENT, first, note)


def _begin_of_error(wrong: Collection[str], everything: Collection[str]) -> list[str]:
    """Return the wrong parameters of the last part of the model, where the backward pass meets the error first.

    An error of a gradient spreads to all parts before it. Parameters outside of layers are returned only if there are
    no others: the embedding comes before all layers, and may be shared with the output layer.
    """
    part_of, parts = parts_of(everything), dict[str, list[str]]()
    for name in wrong:
        if name in part_of:
            parts.setdefault(part_of[name], []).append(name)
    return parts[max(parts, key=in_order)] if parts else list(wrong)


def check_grad_norm(expected: Scores, ranks: Sequence[Scores]) -> Check:
    worst = max((abs(rank.grad_norm / expected.grad_norm - 1) for rank in ranks), key=_nan_last)
    return Check("gradient norm", worst <= GRADIENT, worst, GRADIENT)


def all_checks(expected: Scores, ranks: Sequence[Scores]) -> list[Check]:
    """Return the checks of a trainer, in the order in which an error spreads."""
    return [
        check_round_trip(expected.weights, ranks),
        check_log_probs(expected.log_probs, [rank.log_probs for rank in ranks], "log-probs"),
        check_loss(expected, ranks),
        check_gradients(expected, ranks),
        check_grad_norm(expected, ranks),
    ]


def _ratio(mine: Tensor, theirs: Tensor) -> float | None:
    """Return c if ``mine`` = c · ``theirs``, otherwise None."""
    square = float((theirs.double() ** 2).sum())
    if square == 0:
        return None
    ratio = float((mine.double() * theirs.double()).sum()) / square
    rest = float((mine.double() - ratio * theirs.double()).norm())
    return ratio if rest <= 1e-2 * float(mine.double().norm()) else None


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0


def _nan_last(value: Any) -> float:
    return math.inf if math.isnan(value) else float(value)
