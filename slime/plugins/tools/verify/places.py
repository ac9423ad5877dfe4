"""Find the part of a model whose outputs are wrong, without looking into the backend.

A *variant* of the model has zeros in all projections that write to the residual stream, except those of one part: the
attention or the MLP of one layer. If only the variant of one part differs from the reference, this part is wrong.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_LAYER = re.compile(r"\.(\d+)\.")
_WRITES = re.compile(r"\.(o_proj|down_proj|out_proj|c_proj|dense_4h_to_h|w2|wo|dense)([._](weight|bias))?$")
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
    """Write a variant for every part of the model below ``folder``; none if its projections have unknown names."""
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
        write_model({name: t * 0 if name in silent else t for name, t in weights.items()}, model, variant)
        inside = [name for name in weights if parts.get(name, OUTSIDE) == part]
        places.append(Place(part, tuple(inside), variant))
    return places


def parts_of(names: Iterable[str]) -> dict[str, str]:
    """Return the parts of all tensors in numbered layers. A norm of the layer belongs to the part that it surrounds.

    >>> list(parts_of(["layers.1.mlp.experts.0.w2.weight", "layers.1.ln_2.weight"]).values())
    ['layers.1.mlp', 'layers.1.mlp']
    """
    found = {
        name: (name[: match.end() - 1], name[match.end() :].partition(".")[0])
        for name in names
        if (match := _LAYER.search(name))
    }
    kinds = set(found.values())
    return {name: f"{layer}.{_surrounded(layer, part, kinds)}" for name, (layer, part) in found.items()}


def _surrounded(layer: str, part: str, kinds: set[tuple[str, str]]) -> str:
    """Return the part to which a norm of a layer belongs; another part is returned as it is."""
    is_norm = lambda name: "norm" in name or name.startswith("ln_")  # noqa: E731
    if not is_norm(part):
        return part
    inside = [other for place, other in kinds if place == layer]
    # Where the MLP has norms of its own, the one with this name follows the attention.
    before = part == "post_attention_layernorm" and not any("feedforward" in other for other in inside)
    of_mlp = before or part == "ln_2" or "mlp" in part or "feedforward" in part
    others = [other for other in inside if not is_norm(other) and _is_mlp(other) == of_mlp]
    return min(others, default="mlp" if of_mlp else "self_attn")


def _is_mlp(part: str) -> bool:
    return "attn" not in part and "attention" not in part


def in_order(part: str) -> tuple[int, bool, str]:
    """Return a key that sorts parts of layers by the order in which they run: a layer's attention before its MLP."""
    match = _LAYER.search(f"{part}.")
    return int(match[1]) if match else -1, _is_mlp(part), part


@dataclass(frozen=True)
class Guess:
    """A change of the weights that may explain wrong outputs of a part."""

    text: str
    weights: dict[str, Tensor]


def guesses(place: Place) -> Iterator[Guess]:
    """Yield models with one mistake in a part: two kinds of its tensors swapped, a norm or a bias left out."""
    weights = load_weights(place.variant)
    kinds: dict[str, list[str]] = {}
    for name in place.parameters:
        kinds.setdefault(_kind(name), []).append(name)
    for one, other in itertools.combinations(kinds, 2):
        pairs = list(zip(kinds[one], kinds[other], strict=False))
        if len(kinds[one]) == len(kinds[other]) and all(weights[a].shape == weights[b].shape for a, b in pairs):
            swapped = {a: weights[b] for a, b in pairs} | {b: weights[a] for a, b in pairs}
            yield Guess(f"as if {one} and {other} were swapped", weights | swapped)
    for kind, names in kinds.items():
        if weights[names[0]].dim() == 1:
            bias = kind.endswith("bias")
            plain = {
                name: torch.zeros_like(weights[name]) if bias else torch.ones_like(weights[name]) for name in names
            }
            yield Guess(f"as if {kind} were {'0' if bias else '1'} everywhere", weights | plain)


def write_model(weights: dict[str, Tensor], like: Path, folder: Path) -> None:
    """Write a model with other weights than the model ``like``."""
    folder.mkdir(parents=True)
    for file in like.iterdir():
        if ".safetensors" not in file.name:  # the code of the model, if it has its own, is modeling_*.py
            shutil.copy(file, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_weights(model: Path) -> dict[str, Tensor]:
    """Return the tensors of a model, in the order of its files."""
    return {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _kind(name: str) -> str:
    """Return the name of a tensor within its layer, the same for all experts."""
    match = _LAYER.search(name)
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name[match.end() :] if match else name)
