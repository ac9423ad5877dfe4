"""Steps on the way out, tensor by tensor: cast, rename, leave out (see ``iter_buckets``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from slime.engines.flat import NamedTensor
from slime.weights.update import Transform

if TYPE_CHECKING:
    import torch

FULL_PRECISION = ("e_score_correction_bias", "expert_bias", "A_log")
"""Endings of names that engines keep in their own, wider dtype; casting them would lose bits."""


def cast_floating(dtype: torch.dtype, keep: tuple[str, ...] = FULL_PRECISION) -> Transform:
    """Cast floating tensors to ``dtype``; integer tensors and names that end in ``keep`` pass as they are."""

    def step(name: str, tensor: torch.Tensor) -> Iterable[NamedTensor]:
        casts = tensor.is_floating_point() and not name.endswith(keep)
        return [(name, tensor.to(dtype) if casts else tensor)]

    return step


def rename(names: Mapping[str, str] | Callable[[str], str]) -> Transform:
    """Give tensors other names; a mapping leaves alone what it does not list."""
    new_name = names if callable(names) else lambda name: names.get(name, name)

    def step(name: str, tensor: torch.Tensor) -> Iterable[NamedTensor]:
        return [(new_name(name), tensor)]

    return step


def leave_out(unwanted: Callable[[str], bool]) -> Transform:
    """Drop tensors by name: frozen parameters that the engines have already."""

    def step(name: str, tensor: torch.Tensor) -> Iterable[NamedTensor]:
        return [] if unwanted(name) else [(name, tensor)]

    return step


def frozen_by_flags(only_train: Iterable[str] | None, freeze: Iterable[str] | None) -> Callable[[str], bool] | None:
    """Whether a name is frozen by ``--only-train-params-name-list`` or ``--freeze-params-name-list``.

    Both are lists of regular expressions that are searched in the name. None when neither is given.
    """
    train = [re.compile(pattern) for pattern in only_train or ()]
    frozen = [re.compile(pattern) for pattern in freeze or ()]
    if not train and not frozen:
        return None

    def is_frozen(name: str) -> bool:
        return (bool(train) and not any(p.search(name) for p in train)) or any(p.search(name) for p in frozen)

    return is_frozen
