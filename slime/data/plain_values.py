"""Values from outside the process: JSON from models, clients and data files, which can be passed on
safely, and files of values that survive a crash and are read without running code from them.

Files are written under a temporary name, synced to the disk, then renamed.

A pickle can call any function, so a file from an unknown source must not be unpickled.
``torch.load`` with ``weights_only=True`` refuses all but a few names; this module also allows
numpy's arrays and scalars and some plain types of the standard library. A program whose files hold
objects of its own classes allows these with ``torch.serialization.add_safe_globals([TheClass])``,
for example in the file of its data source.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import secrets
from collections import deque
from collections.abc import Callable
from pathlib import Path, PosixPath, PurePosixPath
from typing import IO, Any, BinaryIO, Protocol, TypeVar, cast

T = TypeVar("T")
MOST_NESTED = 100
"""Maximum nesting of objects and lists. Chat templates, ``json`` and ``copy.deepcopy`` are
recursive, and Python's stack is limited to about 1,000 frames."""
_SURROGATES = {code: "\ufffd" for code in range(0xD800, 0xE000)}


def too_deep(value: object) -> bool:
    """Whether a JSON value nests more than :data:`MOST_NESTED` levels."""
    level = [value]
    for _ in range(MOST_NESTED):
        # Only objects and lists, so that long lists of numbers cost one pass.
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def clean(value: T) -> T:
    """Replace unpaired surrogates in a JSON value by U+FFFD: JSON text can hold them
    (``"\\ud83d"``), UTF-8 cannot.
    """
    if isinstance(value, str):
        return value.translate(_SURROGATES) if not value.isascii() else value  # type: ignore[return-value]
    if isinstance(value, list):
        return [clean(item) for item in value]  # type: ignore[return-value]
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}  # type: ignore[return-value]
    return value


def parse_json(text: str) -> Any:
    """Parse a JSON value such that it can be passed on: with bounded depth, finite numbers and
    whole characters.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or has a number that is not finite.
    """
    try:
        value = DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if too_deep(value):
        raise ValueError("nested too deeply")
    return clean(value)


def no_constant(name: str) -> Any:
    """Refuse NaN and infinities, which Python's reader takes for numbers."""
    raise ValueError(f"{name} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is too large for a number")
    return value


DECODER = json.JSONDecoder(parse_constant=no_constant, parse_float=_finite)
"""Reads JSON with finite numbers only. The depth is not limited, so callers must catch
:class:`RecursionError`.
"""


def decoded(name: str, value: object) -> Any:
    """Return a value, or what its JSON text says; None for an empty text.

    Raises:
        ValueError: The text is not valid JSON; ``name`` is that of the value.
    """
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else None
    except ValueError as error:
        raise ValueError(f"{name} is a text that is not valid JSON: {error}") from error


def metadata_of(value: object) -> dict[str, Any]:
    """Convert None or the JSON text of an object, as rows, users' functions and data sources give
    it, to a dict.

    Raises:
        ValueError: It is something else.
    """
    metadata = decoded("metadata", value)
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise ValueError(f"metadata must be an object (or its JSON text), not {value!r:.100}")
    return metadata


_NUMPY = ("numpy._core.multiarray", "numpy.core.multiarray")
ALLOWED = frozenset({
    *(f"{module}.{name}" for module in _NUMPY for name in ("_reconstruct", "scalar")),
    "numpy.ndarray", "numpy.dtype", "_codecs.encode",
    "builtins.frozenset", "builtins.range", "builtins.slice",
    "builtins.bytes",  # used for empty bytes
    "datetime.datetime", "datetime.date", "datetime.time", "datetime.timedelta", "datetime.timezone",
    "decimal.Decimal", "fractions.Fraction", "uuid.UUID", "pathlib.PosixPath", "pathlib.PurePosixPath",
    # Python 3.13: pathlib._local
    *(f"{kind.__module__}.{kind.__name__}" for kind in (PosixPath, PurePosixPath)),
    "PIL.Image.Image",
})  # fmt: skip
"""Names of classes and functions that only create values. Each is imported when a file uses it."""


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_SCALARS: dict[type, Any] = {str: str.__str__, int: int.__index__, float: float.__float__}
"""For each base class, the function that converts an instance of a subclass to exactly this
class.
"""


class UnsafeFileError(ValueError):
    """A file holds other things than plain values; the message names them and says how to allow
    them.
    """


def load_plain(path: Path) -> Any:
    """Load what ``torch.save`` wrote to ``path``: numbers, strings, containers, tensors and numpy
    arrays, on the CPU.

    Raises:
        UnsafeFileError: The file uses another class or function, or has another format. No code of
            it was run.
    """
    import torch
    from numpy import dtypes

    try:
        asked = set(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    # Older format, or damaged bytes, of which torch raises anything: torch.load below reports it.
    except Exception:
        asked = set()
    # Refused here, with names and advice, before torch refuses the first one with words of its own.
    foreign = sorted(asked - ALLOWED)
    if foreign:
        raise UnsafeFileError(
            f"{path} holds objects of {', '.join(foreign)}. Reading them could run code, so it "
            "was refused. If the file is your own, keep plain values instead (metadata of "
            "samples, state of a data source), or call "
            "torch.serialization.add_safe_globals([...]) with these classes in your own module"
        )
    numpy_types = [value for name, value in vars(dtypes).items() if name.endswith("DType")]
    with torch.serialization.safe_globals([*numpy_types, *map(_find, sorted(asked))]):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        # pickle.UnpicklingError, RuntimeError, and for damaged bytes almost any other
        except Exception as error:
            raise UnsafeFileError(
                f"{path} cannot be read as plain values: {_reason(error)}"
            ) from error


def plain(value: object) -> Any:
    """Convert a value to the plain types that :func:`load_plain` can read.

    Instances of subclasses of dict (``defaultdict``), list, tuple (named tuples), str, int and
    float (enumerations) become instances of these classes, and ``deque`` becomes a list. If a list
    begins with a number or a string, its entries are not converted.
    """
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
    """The reason that torch gives, without its advice to load the file without this protection."""
    found = re.search(r"(?:WeightsUnpickler error:|\n\n\n?)\s*(\S.*?)(?:\. |\.?\n|$)", str(error))
    return found[1] if found else type(error).__name__


def _find(name: str) -> Any:
    """The allowed class or function of this name, together with the name, as ``safe_globals`` needs
    it.
    """
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute), name


# --- writing -------------------------------------------------------------------------------


class Output(Protocol):
    """The methods of a file that ``torch.save`` uses."""

    def write(self, data: bytes | memoryview, /) -> int: ...

    def tell(self) -> int: ...

    def flush(self) -> None: ...


def save_value(value: object, file: IO[bytes] | Output) -> None:
    """Write a value to an open file with ``torch.save``. A full disk raises its :class:`OSError`.

    torch itself raises a RuntimeError that does not name the cause: the error of the file is only
    its context, and there is none if torch has opened the file.
    """
    import torch

    try:
        torch.save(value, cast("IO[bytes]", file))
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def sync_path(path: Path) -> None:
    """Make the contents of a file durable, or the renames and new names inside a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill a temporary file, then rename it to ``path``. A reader sees either the old
    or the new file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a rename is atomic within one file system only.
    aside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(aside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync_path(path.parent)  # without it, the rename could be lost when the power fails


def state_file(directory: str | Path, rollout_id: int) -> Path:
    """Where a snapshot, or a data source below ``--save``, has the state after a rollout."""
    return Path(directory) / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"


def write_state(path: Path, state: object) -> None:
    """Write ``state`` atomically, in the format that ``torch.load`` reads."""
    write_atomically(path, lambda file: save_value(plain(state), file))


def read_state(path: Path) -> Any:
    """Read a file of :func:`write_state`. No code in the file is executed (:func:`load_plain`).

    Raises:
        FileNotFoundError: The file does not exist.
        UnsafeFileError: The file contains something else than plain values.
    """
    if not path.is_file():
        present = (
            ", ".join(sorted(p.name for p in path.parent.iterdir()))
            if path.parent.is_dir()
            else "no such folder"
        )
        raise FileNotFoundError(
            f"state file {path} is missing (the folder contains: {present or 'nothing'})"
        )
    return load_plain(path)
