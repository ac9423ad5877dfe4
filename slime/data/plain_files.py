"""Values that ``torch.save`` wrote, read back without running code.

A pickle may name any function to call, so a file of somebody else's must not be unpickled. ``torch.load`` with
``weights_only=True`` refuses all but a few names; here numpy's arrays and scalars and some plain types of the standard
library are added. A program whose files hold objects of its own classes allows them by
``torch.serialization.add_safe_globals([TheClass])``, for example in the file of its data source.
"""

from __future__ import annotations

import importlib
import pickle
import re
from collections import deque
from pathlib import Path
from typing import Any

_NUMPY = ("numpy._core.multiarray", "numpy.core.multiarray")
ALLOWED = frozenset({
    *(f"{module}.{name}" for module in _NUMPY for name in ("_reconstruct", "scalar")),
    "numpy.ndarray", "numpy.dtype", "_codecs.encode",
    "builtins.frozenset", "builtins.range", "builtins.slice",
    "builtins.bytes",  # of an empty one
    "datetime.datetime", "datetime.date", "datetime.time", "datetime.timedelta", "datetime.timezone",
    "decimal.Decimal", "fractions.Fraction", "uuid.UUID", "pathlib.PosixPath", "pathlib.PurePosixPath",
    "PIL.Image.Image",
})  # fmt: skip
"""Names that only make values. Each is imported when a file asks for it."""


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_SCALARS: dict[type, Any] = {str: str.__str__, int: int.__index__, float: float.__float__}
"""Base class to what makes a value of exactly this class."""


class UnsafeFileError(ValueError):
    """A file holds something else than plain values; the message names it and says how to allow it."""


def load_plain(path: Path) -> Any:
    """What ``torch.save`` wrote to ``path``: numbers, strings, containers, tensors and numpy arrays, on the CPU.

    Raises:
        UnsafeFileError: it asks for another class or function, or is no such file. Nothing of it was run.
    """
    import torch
    from numpy import dtypes

    try:
        asked = set(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except (ValueError, RuntimeError, pickle.UnpicklingError):  # torch's format before 1.6, or damaged: told below
        asked = set()
    foreign = sorted(asked - ALLOWED)
    if foreign:
        raise UnsafeFileError(
            f"{path} holds objects of {', '.join(foreign)}. Reading them could run code, so it was refused. If the "
            "file is your own, keep plain values instead (metadata of samples, state of a data source), or call "
            "torch.serialization.add_safe_globals([...]) with these classes in your own module"
        )
    numpy_types = [value for name, value in vars(dtypes).items() if name.endswith("DType")]
    with torch.serialization.safe_globals([*numpy_types, *map(_find, sorted(asked))]):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise UnsafeFileError(f"{path} cannot be read as plain values: {_reason(error)}") from error


def plain(value: object) -> Any:
    """The same value in plain types, as :func:`load_plain` reads them: subclasses of dict (``defaultdict``), list,
    tuple (named ones), str, int and float (enumerations) become these, and ``deque`` becomes a list. Of lists that
    begin with a number or a string the entries are taken as they are."""
    kind = type(value)
    if kind in _PLAIN or kind.__module__ == "numpy":
        return value
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | deque):
        target = tuple if isinstance(value, tuple) else list
        if not value or type(value[0]) in _PLAIN:
            return value if kind is target else target(value)
        return target(plain(entry) for entry in value)
    for base, exact in _SCALARS.items():
        if isinstance(value, base):
            return exact(value)
    return value


def _reason(error: Exception) -> str:
    """torch's own reason, without its advice to run the file's code after all."""
    found = re.search(r"(?:WeightsUnpickler error:|\n\n\n?)\s*(\S.*?)(?:\. |\.?\n|$)", str(error))
    return found[1] if found else type(error).__name__


def _find(name: str) -> Any:
    """An allowed object, with the name that the file gives it."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute), name
