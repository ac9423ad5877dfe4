"""Compare a backend and layout with the reference, say where they differ first, and find the part
of the model whose outputs are wrong, without looking into the backend.

A *variant* of the model has zeros in all projections that write to the residual stream, except
those of one part: the attention or the MLP of one layer. If only the variant of one part differs
from the reference, this part is wrong.
"""

from __future__ import annotations

import itertools
import math
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .reference import Scores

LOG_PROB = 2e-4
"""Allowed absolute difference of a log-prob in float32."""
LOSS = 2e-5
GRADIENT = 1e-3
"""Allowed norm of the difference of a parameter's gradient, relative to the norm of its
gradient.
"""
NEGLIGIBLE = 1e-5
"""Gradients are compared in full only above this fraction of the norm of the whole gradient: below,
they are rounding (that of a key's bias is 0)."""


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
    """Compare the weights that a backend has loaded and gathered again with those of the
    checkpoint, bit for bit.
    """
    what = "weights round trip"
    for number, rank in enumerate(ranks):
        for name in {**expected, **rank.weights}:
            theirs = expected.get(name)
            mine = rank.weights.get(name)
            far = math.inf
            if theirs is None:
                note = "the checkpoint has no such tensor"
            elif mine is None:
                note = f"it is missing on rank {number}"
            elif mine.shape == theirs.shape and torch.equal(mine, theirs):
                continue
            else:
                note = f"it has other values on rank {number}"
                far = _largest(mine - theirs) if mine.shape == theirs.shape else far
            return Check(what, False, far, 0.0, name, note)
    return Check(what, True, 0.0, 0.0)


def check_log_probs(
    expected: Mapping[int, Tensor], found: Sequence[Mapping[int, Tensor]], what: str
) -> Check:
    """Compare log-probs of all samples. ``found`` has those of each rank, which may be of a part of
    the samples.
    """
    # Ranks have parts of the samples, and all together every one.
    worst = 0.0
    where = ""
    for number, rank in enumerate(found):
        for position, mine in rank.items():
            far = _nan_last(_largest(mine - expected[position]))
            if far > worst:
                worst = far
                where = f"sample {position} on rank {number}"
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
    # Each parameter on each rank, relative to its own norm unless that is rounding.
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
    if not wrong:
        return Check("gradients", True, worst, GRADIENT)
    first = next(name for name in expected.gradients if name in wrong)
    trained = [name for name, g in expected.gradients.items() if float(g.double().norm()) > least]
    note = (
        f"{len(wrong)} of {len(expected.gradients)} parameters differ, the first on rank "
        f"{wrong[first]}"
    )
    # If all are wrong, the fault is in what they share.
    if set(trained) <= set(wrong):
        note += (
            ": all of them, so look at the sum of gradients over data-parallel ranks and at the "
            "divisor of the loss"
        )
    else:
        note += (
            ": a sum over tensor-, sequence- or context-parallel ranks is missing there, or its "
            "backward is wrong"
        )
        note += (
            f"; in the backward pass, {', '.join(_begin_of_error(wrong, expected.gradients))} "
            "differ first"
        )
    return Check("gradients", False, worst, GRADIENT, first, note)


def _begin_of_error(wrong: Collection[str], everything: Collection[str]) -> list[str]:
    """Return the wrong parameters of the last part of the model, where the backward pass meets the
    error first.

    An error of a gradient spreads to all parts before it. Parameters outside of layers are returned
    only if there are no others: the embedding comes before all layers, and may be shared with the
    output layer.
    """
    part_of = parts_of(everything)
    parts = dict[str, list[str]]()
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


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0


def _nan_last(value: Any) -> float:
    return math.inf if math.isnan(value) else float(value)


_LAYER = re.compile(r"\.(\d+)\.")
_WRITES = re.compile(
    r"\.(o_proj|down_proj|out_proj|c_proj|dense_4h_to_h|w2|wo|dense)([._](weight|bias))?$"
)
OUTSIDE = "embeddings, final norm or output layer"


@dataclass(frozen=True)
class Place:
    """A part of the model.

    Attributes:
        name: Such as ``model.layers.1.mlp``, or :data:`OUTSIDE`.
        parameters: The names of its parameters, in the order of the checkpoint.
        variant: The folder of the model in which only this part has an effect.
    """

    name: str
    parameters: tuple[str, ...]
    variant: Path


def write_variants(model: Path, folder: Path) -> list[Place]:
    """Write a variant for every part of the model below ``folder``; none if its projections have
    unknown names.
    """
    # Every part of a layer that writes to the residual stream can be silenced by zeros.
    weights = load_weights(model)
    parts = parts_of(weights)
    writers: dict[str, list[str]] = {}
    for name in weights:
        if name in parts and _WRITES.search(name):
            writers.setdefault(parts[name], []).append(name)
    places = []
    for number, part in enumerate([OUTSIDE, *sorted(writers, key=in_order)] if writers else []):
        silent = {name for other, names in writers.items() if other != part for name in names}
        variant = folder / f"variant_{number}"
        write_model(
            {name: t * 0 if name in silent else t for name, t in weights.items()}, model, variant
        )
        inside = [name for name in weights if parts.get(name, OUTSIDE) == part]
        places.append(Place(part, tuple(inside), variant))
    return places


def parts_of(names: Iterable[str]) -> dict[str, str]:
    """Return the parts of all tensors in numbered layers. A norm of the layer belongs to the part
    that it surrounds.

    >>> list(parts_of(["layers.1.mlp.experts.0.w2.weight", "layers.1.ln_2.weight"]).values())
    ['layers.1.mlp', 'layers.1.mlp']
    """
    places = {
        name: (name[: match.end() - 1], name[match.end() :].partition(".")[0])
        for name in names
        if (match := _LAYER.search(name))
    }
    # Norms belong to what they surround: zeros there would hide a wrong norm.
    kinds = set(places.values())
    return {
        name: f"{layer}.{_surrounded(layer, part, kinds)}" for name, (layer, part) in places.items()
    }


def _surrounded(layer: str, part: str, kinds: set[tuple[str, str]]) -> str:
    """Return the part to which a norm of a layer belongs; another part is returned as it is."""
    is_norm = lambda name: "norm" in name or name.startswith("ln_")  # noqa: E731
    if not is_norm(part):
        return part
    inside = [other for place, other in kinds if place == layer]
    # Where the MLP has norms of its own, the one with this name follows the attention.
    before = part == "post_attention_layernorm" and not any(
        "feedforward" in other for other in inside
    )
    of_mlp = before or part == "ln_2" or "mlp" in part or "feedforward" in part
    others = [other for other in inside if not is_norm(other) and _is_mlp(other) == of_mlp]
    return min(others, default="mlp" if of_mlp else "self_attn")


def _is_mlp(part: str) -> bool:
    return "attn" not in part and "attention" not in part


def in_order(part: str) -> tuple[int, bool, str]:
    """Return a key that sorts parts of layers by the order in which they run: a layer's attention
    before its MLP.
    """
    match = _LAYER.search(f"{part}.")
    return int(match[1]) if match else -1, _is_mlp(part), part


@dataclass(frozen=True)
class Guess:
    """A change of the weights that may explain wrong outputs of a part."""

    text: str
    weights: dict[str, Tensor]


def guesses(weights: Mapping[str, Tensor], parameters: Iterable[str]) -> Iterator[Guess]:
    """Yield models with one mistake in these parameters: two kinds of them swapped, a norm or a
    bias left out.
    """
    # Mistakes that converters make: tensors of one shape that are swapped, a norm or bias left out.
    kinds: dict[str, list[str]] = {}
    for name in parameters:
        kinds.setdefault(_kind(name), []).append(name)
    for one, other in itertools.combinations(kinds, 2):
        pairs = list(zip(kinds[one], kinds[other], strict=False))
        if len(kinds[one]) == len(kinds[other]) and all(
            weights[a].shape == weights[b].shape for a, b in pairs
        ):
            swapped = {a: weights[b] for a, b in pairs} | {b: weights[a] for a, b in pairs}
            yield Guess(f"as if {one} and {other} were swapped", {**weights, **swapped})
    for kind, names in kinds.items():
        if weights[names[0]].dim() == 1:
            bias = kind.endswith("bias")
            plain = {
                name: torch.zeros_like(weights[name]) if bias else torch.ones_like(weights[name])
                for name in names
            }
            yield Guess(
                f"as if {kind} were {'0' if bias else '1'} everywhere", {**weights, **plain}
            )


def write_model(weights: dict[str, Tensor], like: Path, folder: Path) -> None:
    """Write a model with other weights than the model ``like``."""
    folder.mkdir(parents=True)
    for file in like.iterdir():
        # the code of the model, if it has its own, is modeling_*.py
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copy(file, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_weights(model: Path) -> dict[str, Tensor]:
    """Return the tensors of a model, in the order of its files."""
    return {
        name: tensor
        for file in sorted(model.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def _kind(name: str) -> str:
    """Return the name of a tensor within its layer, the same for all experts."""
    match = _LAYER.search(name)
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name[match.end() :] if match else name)
