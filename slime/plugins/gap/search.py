"""Find the causes that close the gap between engine and trainer, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slime.plugins.gap.causes import (
    NO_FLAG,
    Cause,
    causes,
    exchange,
    faults,
    fitted,
    layer_of,
)
from slime.plugins.gap.reference import Reference, Weights, logits_of, token_scores
from slime.plugins.tools.verify.check import in_order, parts_of

SMALL = 10**7
LEAST_TOKENS = 256
MOST_TOKENS = 1024
"""Causes are looked for in the samples with the largest gaps, up to so many compared tokens: the
first number with more than ``SMALL`` parameters."""
MOST_CAUSES = 3
EXPLAINED = 0.9
"""If the causes close less, parts of the weights are looked at."""
LEAST = 0.1
"""A cause has to close at least so much of what the causes before it have left."""
MOST_PARTS = 64
MOST_FITTED = 6
FIRST_STEPS = 2
FIT_STEPS = 25
ROUNDING = 8.0
"""A gap is owed to the order of sums if it is no more than so many times the reference's own
rounding."""


@dataclass(frozen=True)
class Found:
    """A cause, and what it explains.

    Attributes:
        side: Whose log-probs have it: ``engine`` or ``trainer``.
        closes: The part of the mean absolute gap that is gone without it and those before it, in
            the samples in which it was looked for.
        layers: The part that each layer has in its effect, of the first cause.
    """

    cause: str
    side: str
    flag: str
    closes: float
    layers: Mapping[str, float]


@dataclass(frozen=True)
class Explained:
    """The causes of a gap.

    Attributes:
        mean, largest: Of the absolute gap.
        of_engine, of_trainer: The mean absolute difference of either side from the reference.
        rounding: The mean absolute difference that another precision makes to the reference: that
            of the side with the coarser dtype, or float64.
        closed: What the causes together close, by one more pass over all samples.
        left: The gap of all compared tokens without the causes, float64 ``[tokens]``.
    """

    tokens: int
    mean: float
    largest: float
    of_engine: float
    of_trainer: float
    rounding: float
    causes: tuple[Found, ...]
    closed: float
    left: Tensor

    @property
    def first(self) -> str:
        """The first cause."""
        if self.causes:
            return self.causes[0].cause
        if not self.mean:
            return "none: the log-probs are equal bit for bit"
        return "rounding: another order of sums" if self.only_rounding else "not found"

    @property
    def only_rounding(self) -> bool:
        """Whether what is left is as small as another order of sums makes it."""
        return _mean(self.left) <= ROUNDING * self.rounding


@dataclass(frozen=True)
class Effect:
    """What a cause does to the log-probs of the samples.

    Attributes:
        judged: The tokens by which it is judged.
        sign: 1 if the engine has the cause, -1 if the trainer has it.
        closes: The part of the gap that it closes, with those before it.
    """

    cause: Cause
    change: Tensor
    judged: Tensor
    sign: float = 1.0
    closes: float = 0.0


def explain(
    whole: Reference, older: Mapping[str, Weights], dtypes: Sequence[torch.dtype]
) -> Explained:
    """Find the causes of a gap, and check them by one more pass.

    Args:
        whole: The reference with all samples of the step.
        older: Other weights that a side may have had, by what they are.
        dtypes: Those in which the two sides compute.
    """
    by_gap = sorted(whole.samples, key=lambda one: -_mean(one.gap))
    size = sum(tensor.numel() for tensor in whole.plain.weights.values())
    most = LEAST_TOKENS if size > SMALL else MOST_TOKENS
    enough = torch.tensor([len(one.gap) for one in by_gap]).cumsum(0) <= most
    reference = whole.with_samples(by_gap[: max(int(enough.sum()), 1)])
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    other = torch.float64 if coarsest == torch.float32 else coarsest
    rounding = _mean(whole.scored(replace(whole.plain, dtype=other)) - whole.score)
    small = _mean(whole.gap) <= ROUNDING * rounding
    chosen: list[Effect] = []
    if whole.gap.any() and not (small and coarsest == torch.float32):
        effects = [_effect(reference, cause) for cause in causes(reference, older)]
        chosen = _choose(effects, reference.gap)
        # Each further search is longer, so it begins only if nothing else explains enough.
        searches = (
            lambda: (_effect(reference, cause) for cause in faults(reference)),
            lambda: _of_parts(reference, effects),
            lambda: _fits(reference),
        )
        for search in () if small else searches:
            if not chosen or chosen[-1].closes < EXPLAINED:
                effects += search()
                chosen = _choose(effects, reference.gap)
    left = _checked(whole, chosen)
    return Explained(
        tokens=len(left),
        mean=_mean(whole.gap),
        largest=float(whole.gap.abs().max()),
        of_engine=_mean(whole.engine - whole.score),
        of_trainer=_mean(whole.trainer - whole.score),
        rounding=rounding,
        causes=tuple(
            Found(
                one.cause.text,
                "engine" if one.sign > 0 else "trainer",
                one.cause.flag,
                one.closes,
                _layers(reference, one) if one is chosen[0] else {},
            )
            for one in chosen
        ),
        closed=1 - _mean(left) / max(_mean(whole.gap), 1e-30),
        left=left,
    )


def _mean(values: Tensor) -> float:
    return float(values.abs().mean())


def _everything(_name: str) -> bool:
    return True


def _effect(reference: Reference, cause: Cause) -> Effect:
    change = reference.scored(cause.change(reference.plain, _everything)) - reference.score
    return Effect(cause, change, torch.ones_like(change, dtype=torch.bool))


def _choose(effects: Sequence[Effect], gap: Tensor) -> list[Effect]:
    """Return the effects that close most of the gap, one after the other."""

    def closes(effect: Effect) -> float:
        rest = (left - effect.sign * effect.change)[effect.judged]
        value = 1 - _mean(rest) / _mean(left[effect.judged])
        # Of causes that explain the same, the first is named.
        return round(value, 4) if rest.isfinite().all() else -1.0

    signed = [replace(effect, sign=sign) for effect in effects for sign in (1.0, -1.0)]
    chosen: list[Effect] = []
    left = gap
    while len(chosen) < MOST_CAUSES:
        best = max(signed, key=closes)
        if closes(best) < LEAST:
            break
        left = left - best.sign * best.change
        chosen.append(replace(best, closes=1 - _mean(left) / _mean(gap)))
    return chosen


def _checked(whole: Reference, chosen: Sequence[Effect]) -> Tensor:
    """Return the gap of all samples without the causes, those of each side together."""
    left = whole.gap
    for sign in (1.0, -1.0):
        setup = whole.plain
        for one in chosen:
            if one.sign == sign:
                setup = one.cause.change(setup, _everything)
        left = left - sign * (whole.scored(setup) - whole.score)
    return left


# --- parts of the model ---------------------------------------------------------------------------


def _layers(reference: Reference, effect: Effect) -> dict[str, float]:
    """Return the part of each layer in the effect of a cause, by exchanging one at a time."""
    square = max(float(effect.change @ effect.change), 1e-30)
    found = {}
    for layer in (
        dict.fromkeys(map(layer_of, reference.plain.weights)) if effect.cause.layered else ()
    ):
        setup = effect.cause.change(reference.plain, lambda name, at=layer: layer_of(name) == at)  # type: ignore[misc]
        change = reference.scored(setup) - reference.score
        found[layer] = float(change @ effect.change) / square
    return found


def _of_parts(reference: Reference, effects: Sequence[Effect]) -> Iterator[Effect]:
    """Exchange one part of the weights at a time, for each cause that is one of weights.

    The gap is then a sum of the effects of those parts that one side has, with factors of 1, and of
    the others, with 0: a least-squares problem.
    """
    plain = reference.plain.weights
    for cause, weights in ((one.cause, one.cause.weights) for one in effects):
        names = [n for n in weights or () if n in plain and not torch.equal(plain[n], weights[n])]  # type: ignore[index]
        parts = {}
        for part, members in _parts(names, whole_layers=cause.flag == NO_FLAG).items():
            effect = _effect(reference, _limited(cause, members, part))
            if 0 < float(effect.change.abs().max()) < torch.inf:
                parts[part] = members, effect.change
        if len(parts) < 2:
            continue
        matrix = torch.stack([change for _, change in parts.values()], 1)
        factors = torch.linalg.lstsq(matrix, reference.gap[:, None]).solution[:, 0]
        for sign in (1, -1):
            some = [
                part for part, factor in zip(parts, factors, strict=True) if sign * factor > 0.5
            ]
            if 0 < len(some) < len(parts):
                members = [name for part in some for name in parts[part][0]]
                more = f" and {len(some) - 4} more" if len(some) > 4 else ""
                yield _effect(reference, _limited(cause, members, ", ".join(some[:4]) + more))


def _parts(names: Sequence[str], whole_layers: bool) -> dict[str, list[str]]:
    """Divide tensors: by layers, or each for itself, or by parts of layers if there are many."""
    parts = parts_of(names) if len(names) > MOST_PARTS else {}
    found: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda one: in_order(parts.get(one, ""))):
        part = layer_of(name) if whole_layers else parts.get(name, name)
        found.setdefault(part, []).append(name)
    return found


def _limited(cause: Cause, names: Iterable[str], where: str) -> Cause:
    assert cause.weights is not None
    change = exchange({name: cause.weights[name] for name in names})
    return Cause(f"{cause.text}, only in {where}", cause.flag, change, False)


# --- one tensor -----------------------------------------------------------------------------------


def _fits(reference: Reference) -> Iterator[Effect]:
    """Fit one tensor at a time to the engine's log-probs.

    A tensor has more values than there are tokens, so each is fitted on one half of the samples and
    judged on the other: the log-probs of samples that were not seen are met only by the right one.
    """
    sizes = torch.tensor([len(one.gap) for one in reference.samples])
    seen = torch.repeat_interleave(torch.arange(len(sizes)), sizes) % 2 == 0
    model = reference.model(reference.plain)
    score = _differentiable(reference, model)
    parameters = dict(model.named_parameters())

    def unseen(name: str) -> float:
        value = _fit(score, parameters[name], reference.engine, seen, FIRST_STEPS)
        change = _effect(reference, fitted(name, value)).change
        return _mean((reference.gap - change)[~seen])

    # A few steps tell which tensors to fit.
    for name in sorted(parameters, key=unseen)[:MOST_FITTED]:
        value = _fit(score, parameters[name], reference.engine, seen, FIT_STEPS)
        yield replace(_effect(reference, fitted(name, value)), judged=~seen)


def _differentiable(reference: Reference, model: PreTrainedModel) -> Callable[[], Tensor]:
    def score() -> Tensor:
        pairs = zip(logits_of(model, reference.samples), reference.samples, strict=True)
        return torch.cat([token_scores(z, one, reference.plain.sampling) for z, one in pairs])

    return score


def _fit(
    score: Callable[[], Tensor],
    parameter: torch.nn.Parameter,
    target: Tensor,
    seen: Tensor,
    steps: int,
) -> Tensor:
    """Return the values of a parameter with which the model is closest to ``target``."""
    before = parameter.detach().clone()
    optimizer = torch.optim.LBFGS(
        [parameter], max_iter=steps, line_search_fn="strong_wolfe", tolerance_change=1e-12
    )

    def closure() -> float:
        optimizer.zero_grad()
        loss = ((score() - target)[seen] ** 2).sum()
        loss.backward(inputs=[parameter])
        return float(loss.detach())

    optimizer.step(closure)
    value = parameter.detach().clone()
    parameter.data.copy_(before)
    return value
