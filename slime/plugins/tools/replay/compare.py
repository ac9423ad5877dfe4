"""Compare a replayed step with what the run recorded of it, and say so in the lines that ``slime
replay`` prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.config.layout import ParallelLayout
from slime.observability.run_state import SentWeights, digest_of_digests

from . import steps_text

if TYPE_CHECKING:
    import torch

    from .capture import SampleFacts
    from .step import Replayed

ORDER = ("rollout/", "passrate/", "multi_turn/", "train/critic-", "train/")
"""Metrics in the order in which a step computes them, so that the first difference is the one
closest to its cause.
"""
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 3e-3}
"""By ``--train-dtype``, the tolerance of a replay with other kernels or another layout."""
COUNTED = 0.02
"""The least tolerance, in the same replays, of a fraction of clipped tokens: a ratio at the bound
of the clip may come to lie on its other side."""


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
        missing: Metrics of the step that the run recorded and the replay does not compute, such as
            those of filters.
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
        tolerance: The difference that is allowed, relative to the recorded value or absolute below
            1; 0 means that the numbers must be equal bit for bit.
    """
    # Times and memory are never the same.
    kept = [name for name in recorded if name.startswith(ORDER) and not name.endswith("/step")]
    names = sorted((name for name in kept if name in replayed), key=_order)
    compared = [Difference(name, recorded[name], _finite(replayed[name])) for name in names]
    unequal = [one for one in compared if one.recorded != one.replayed]
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


def matches(
    sent: SentWeights, digests: Mapping[str, str], frozen: Callable[[str], bool] | None
) -> bool | None:
    """Return whether weights are those that were sent to the engines.

    The result is None if this cannot be decided, because the update had other tensors.

    Args:
        digests: By name, of all weights.
        frozen: Whether a tensor is frozen, so that an update may have left it out.
    """
    # Updates have all weights, or those that are trained.
    trained = {
        name: digest for name, digest in digests.items() if frozen is None or not frozen(name)
    }
    chosen = next((some for some in (digests, trained) if len(some) == sent.tensors), None)
    return None if chosen is None else digest_of_digests(chosen) == sent.digest


def first_unequal(recorded: Mapping[str, str], replayed: Mapping[str, str]) -> str | None:
    """Return the first name, in the order of the checkpoint, whose digests differ."""
    return next((name for name in recorded if recorded[name] != replayed.get(name)), None)


MOST_DIFFERENCES = 8
SHOWN = {
    "loss_masks": "mask",
    "rollout_log_probs": "engine",
    "log_probs": "old",
    "ref_log_probs": "reference",
    "teacher_log_probs": "teacher",
    "advantages": "advantage",
    "staleness": "staleness",
}
"""The headings of the columns of a sample, by entry of the batch."""


def page(result: Replayed) -> Iterator[str]:
    """Yield the lines that describe a replay."""
    layout = layout_text(result.layout)
    ranks = result.layout.world_size
    yield (
        f"step {result.step} again, on the {result.device}, {ranks} rank{'s' if ranks > 1 else ''}{layout}"
    )
    through = (
        f", then {steps_text(result.start, result.step)} again"
        if result.start < result.step
        else ""
    )
    yield f"state before it: {result.state}{through}"
    yield f"samples: {result.samples} in {result.groups} groups"
    how = (
        "bit for bit"
        if result.tolerance == 0
        else f"within {result.tolerance:g} (relative, absolute below 1)"
    )
    compared = result.metrics
    good = len(compared.names) - len(compared.differences)
    yield (
        f"metrics: {good} of {len(compared.names)} equal "
        f"{how}{_largest(compared.largest, result.tolerance)}"
    )
    for one in compared.differences[:MOST_DIFFERENCES]:
        yield f"    {one.name}: recorded {one.recorded}, now {one.replayed}"
    if compared.missing:
        count = len(compared.missing)
        yield (
            f"    {count} metrics of generation are not computed again "
            f"({', '.join(compared.missing[:2])}, ...)"
        )
    yield from _weights(result)
    if result.skipped:
        yield "the actor was not trained in this step (--num-critic-only-steps)"
    if result.equal and result.exact:
        yield "equal: this step is the recorded one, bit for bit"
    elif result.equal:
        yield "equal within the tolerance"
    else:
        yield f"DIFFERS, first in {result.first}"


def layout_text(layout: ParallelLayout) -> str:
    """Return the parallel sizes above 1, such as ``, TP 2, CP 2``."""
    sizes = {"TP": layout.tp, "PP": layout.pp, "CP": layout.cp, "EP": layout.ep, "DP": layout.dp}
    return "".join(f", {name} {size}" for name, size in sizes.items() if size > 1)


def _largest(largest: Difference | None, tolerance: float) -> str:
    if largest is None or tolerance == 0:
        return ""
    return f"; the largest difference is {largest.size:.2g} ({largest.name})"


def _weights(result: Replayed) -> Iterator[str]:
    said = {
        True: "equal those that the engines had",
        False: "DIFFER from those that the engines had",
    }
    if result.before is not None and (result.exact or result.before):
        yield f"weights before the step: {said[result.before]}"
    if result.after is not None and (result.exact or result.after):
        yield f"weights after the step: {said[result.after]} (version {result.version})"
    if not result.tensors:
        if result.after is None:
            yield (
                "weights after the step: not recorded (no snapshot after the step, and no digest "
                "of an update)"
            )
        return
    # How far the snapshot is, measured by what the step has changed.
    if result.differs is None:
        yield f"snapshot after the step: all {result.tensors} weight tensors are equal"
    elif result.distance is not None:
        far, step = result.distance
        yield (
            f"snapshot after the step: {result.differs} is the first of {result.tensors} weight "
            f"tensors that differs, by {far:.2g} (the step changed it by {step:.2g}); the largest "
            f"difference of a tensor is {result.worst:.2g} of its change by the step"
        )


def sample_page(sample: SampleFacts, texts: Sequence[str]) -> Iterator[str]:
    """Yield the lines that describe one sample token by token.

    Args:
        texts: The text of each response token; empty if the tokenizer cannot be read.
    """
    numbers = ", ".join(f"{name} {value:g}" for name, value in sample.numbers.items())
    prompt = len(sample.tokens) - sample.response_length
    yield f"sample: {prompt} prompt tokens, {sample.response_length} response tokens, {numbers}"
    if not sample.parts:
        yield (
            "    it adds nothing to the loss: all its advantages are 0, or its loss cannot be "
            "divided into samples"
        )
    for part in sample.parts:
        yield (
            f"    optimizer step {part.step}: it adds {part.loss:.6g} to the loss "
            f"({len(part.index)} tokens)"
        )
    # What was recorded of each token, then what the replay found.
    columns: dict[str, torch.Tensor] = {
        title: sample.per_token[name] for name, title in SHOWN.items() if name in sample.per_token
    }
    columns |= _of_loss(sample)
    yield "    " + "".join(f"{title:>12}" for title in ["position", "token", *columns]) + "  text"
    response = sample.tokens[prompt:].tolist()
    for place, token in enumerate(response):
        cells = "".join(f"{float(values[place]):>12.5g}" for values in columns.values())
        text = repr(texts[place]) if texts else ""
        yield f"    {place:>12}{token:>12}{cells}  {text}"


def _of_loss(sample: SampleFacts) -> dict[str, torch.Tensor]:
    """Return the trainer's log-probs and the gradient of the loss for each token, of the first
    optimizer step.
    """
    import torch

    if not sample.parts:
        return {}
    trainer, gradient = (torch.full((sample.response_length,), float("nan")) for _ in range(2))
    for part in sample.parts:
        if part.step == sample.parts[0].step:
            trainer[part.index] = part.log_probs
            gradient[part.index] = part.gradient
    return {"trainer": trainer, "dloss/dlogp": gradient}
