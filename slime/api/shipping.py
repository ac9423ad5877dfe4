"""Functions of a program or notebook, made available to a run.

A small file of Python stands for each function, so that it has a path like that of any other function of the user's,
and all of slime treats it as one. In this process, the file gives the function itself. For other processes, the
function is pickled by value with cloudpickle, which Ray brings. They get a copy: what it changes outside of itself is
not seen by the program.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LOADER = '''"""{what}, as it was given to slime in Python."""

from slime.api.shipping import unpack

{name} = unpack(__file__, {paths!r})
'''


_held: dict[Path, Callable[..., object]] = {}
"""The functions of this process, by the files that stand for them."""


def ship(function: Callable[..., object], name: str, folder: Path) -> str:
    """Write a file for ``function``, and return its path in the form of the command line, ``file.py:name``.

    Until :func:`pack`, the function can be loaded in this process only.

    Args:
        name: A Python name, also that of the file.
    """
    loader = folder / f"{name}.py"
    _held[loader] = function
    paths = [str(Path(path or ".").resolve()) for path in sys.path]
    loader.write_text(_LOADER.format(what=name, name=name, paths=paths), encoding="utf-8")
    return f"{loader}:{name}"


def pack(folder: Path) -> list[str]:
    """Pickle the functions that were shipped to ``folder``, for other processes.

    Returns:
        Problems: functions that refer to something that cannot be pickled, such as a lock or a connection.
    """
    from ray import cloudpickle

    problems = []
    for loader, function in _held.items():
        if loader.parent != folder:
            continue
        try:
            loader.with_suffix(".pkl").write_bytes(cloudpickle.dumps(function))
        except Exception as error:  # Objects raise what they like when they are pickled.
            problems.append(f"{loader.stem}: {_blame(function, error)}")
    return problems


def forget(folder: Path) -> None:
    """Drop the functions that were shipped to ``folder``."""
    for loader in [loader for loader in _held if loader.parent == folder]:
        del _held[loader]


def unpack(loader: str, paths: list[str]) -> Any:
    """Return the function for which the file ``loader`` stands.

    Args:
        paths: The program's ``sys.path``, on which the modules that the function imports are found.
    """
    if (function := _held.get(Path(loader))) is not None:
        return function
    from ray import cloudpickle

    sys.path.extend(path for path in paths if path not in sys.path)
    return cloudpickle.loads(Path(loader).with_suffix(".pkl").read_bytes())


def _blame(function: Callable[..., object], error: Exception) -> str:
    """Explain the error, with the variables of the function that cannot be pickled."""
    from ray import cloudpickle

    inner = inspect.unwrap(getattr(function, "function", function))
    variables: dict[str, object] = {}
    if inspect.isfunction(inner):
        found = inspect.getclosurevars(inner)
        variables = {**found.globals, **found.nonlocals}
    elif inspect.ismethod(inner):
        variables = {"self": inner.__self__}
    guilty = []
    for name, value in variables.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            guilty.append(f"{name} (a {type(value).__name__})")
    where = f": it uses {', '.join(guilty)}" if guilty else ""
    return (
        f"it cannot be sent to the processes of the run{where} ({type(error).__name__}: {error}); create such objects "
        "inside the function"
    )
