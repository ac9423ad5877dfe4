"""Storage of the per-token fields of a :class:`~slime.data.sample.Sample`: hooks see lists, stored are arrays.

A field is stored either as the value that was assigned to it (usually a list) or, once it has been packed, as a
read-only numpy array. Reading the attribute of a packed field converts it to a list and stores that list, so that
users' code always works on one real, mutable list. The framework itself reads arrays, which create no Python object per
token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

TOKEN_FIELDS: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "loss_mask": np.int8,
    "rollout_log_probs": np.float32,
    "teacher_log_probs": np.float32,
}
"""Per-token fields and the dtypes in which they are packed."""


class Packed:
    """A per-token field as a read-only array. It never changes, so copies of a sample share it.

    Args:
        values: [n]; becomes read-only.
    """

    __slots__ = ("values",)

    def __init__(self, values: np.ndarray) -> None:
        values.flags.writeable = False
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __copy__(self) -> Packed:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Packed:
        return self

    def __reduce__(self) -> tuple[type[Packed], tuple[np.ndarray]]:
        return Packed, (self.values,)


class UnsetMask(list[int]):
    """The empty loss mask that a generate function gets and may extend.

    It keeps its type in copies. The type distinguishes a function that does not use masks, so that all tokens are
    trained, from one that has emptied the mask itself.
    """


def is_unset(mask: object) -> bool:
    """Whether no loss mask was set: it is None, or an :class:`UnsetMask` that is still empty."""
    return mask is None or (isinstance(mask, UnsetMask) and not mask)


class Normalised:
    """Descriptor of a field whose values pass through ``function`` when they are assigned."""

    def __init__(self, name: str, function: Callable[[object], object]) -> None:
        self.name, self.function = name, function

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        try:
            return instance.__dict__[self.name]
        except KeyError:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}") from None

    def __set__(self, instance: object, value: object) -> None:
        instance.__dict__[self.name] = self.function(value)


class TokenField(Normalised):
    """Descriptor of a per-token field; ``sample.__dict__`` holds a :class:`Packed` array or the assigned value."""

    def __init__(self, name: str) -> None:
        super().__init__(name, lambda value: value)

    def __get__(self, instance: object, owner: type) -> Any:
        value = super().__get__(instance, owner)
        if isinstance(value, Packed):
            value = instance.__dict__[self.name] = value.values.tolist()
        return value


def as_array(name: str, values: object) -> np.ndarray:
    """[n] in the dtype of the field; log-probabilities that float32 cannot represent exactly stay float64.

    Raises:
        ValueError, TypeError, OverflowError: ``values`` is not a flat sequence of such numbers.
    """
    if isinstance(values, Packed):
        return values.values
    if hasattr(values, "detach"):  # a tensor, possibly on a GPU
        values = values.detach().cpu().numpy()
    dtype = TOKEN_FIELDS[name]
    if dtype is np.float32:
        exact: np.ndarray = np.asarray(values, np.float64)
        with np.errstate(over="ignore"):
            array: np.ndarray = exact.astype(np.float32)
        if not np.array_equal(array, exact):
            array = exact
    else:
        array = np.asarray(values, dtype)
    if array.ndim != 1:
        raise ValueError(f"an array of {array.ndim} dimensions, not one number per token")
    return array


def pack(instance: object) -> None:
    """Store every per-token field as an array; a field that does not hold numbers is left unchanged."""
    held = instance.__dict__
    for name in TOKEN_FIELDS:
        value = held.get(name)
        if is_unset(value) or isinstance(value, Packed):
            continue
        try:
            array = as_array(name, value)
        except (ValueError, TypeError, OverflowError):
            continue  # The conversion to train data reports it, with the name of the sample.
        # Packed makes its array read-only, so it must not be one that somebody else holds or a view of one.
        held[name] = Packed(array.copy() if array is value or array.base is not None else array)


def take_arrays(instance: object) -> None:
    """Store the arrays and tensors that a hook assigned as packed fields.

    Raises:
        ValueError: One does not hold one number per token; the message begins with the name of the field.
    """
    held = instance.__dict__
    for name in TOKEN_FIELDS:
        if hasattr(held[name], "tolist"):
            try:
                held[name] = Packed(np.array(as_array(name, held[name])))
            except (ValueError, TypeError, OverflowError) as error:
                raise ValueError(f"{name} is {error}") from error


def extend(instance: object, name: str, values: Sequence[float] | np.ndarray) -> None:
    """Append to a field. A list is extended in place, so other references to it see the new entries."""
    held = instance.__dict__
    old = held[name]
    if isinstance(old, list):
        old.extend(values.tolist() if hasattr(values, "tolist") else values)
    elif isinstance(old, Packed) or (old is None and isinstance(values, np.ndarray)):
        parts = [as_array(name, part) for part in (old, values) if part is not None]
        held[name] = Packed(np.concatenate(parts))
    else:
        before = [] if old is None else old.tolist() if hasattr(old, "tolist") else list(old)
        held[name] = [*before, *(values.tolist() if hasattr(values, "tolist") else values)]


def cut(instance: object, name: str, length: int) -> None:
    """Keep the first ``length`` entries of a field that is set."""
    value = instance.__dict__[name]
    if value is not None:
        instance.__dict__[name] = Packed(value.values[:length].copy()) if isinstance(value, Packed) else value[:length]
