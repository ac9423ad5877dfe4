"""Functions of a program or notebook, made available to the processes of a run.

A function is pickled by value with cloudpickle, which Ray brings, and a small file of Python beside the pickle loads
it. So the function has a path like that of any other function of the user's, and all of slime treats it as one. A
process gets a copy: what the function changes outside of itself is not seen by the program.
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


class NotShippable(ValueError):
    """A function cannot be sent to the processes of the run; the message says which part of it."""


def ship(function: Callable[..., object], name: str, folder: Path) -> str:
    """Write ``function`` to ``folder``, and return its path in the form of the command line, ``file.py:name``.

    Args:
        name: A Python name, also that of the files.

    Raises:
        NotShippable: The function refers to something that cannot be pickled, such as a lock or a connection.
    """
    from ray import cloudpickle

    try:
        data = cloudpickle.dumps(function)
    except Exception as error:  # Objects raise what they like when they are pickled.
        raise NotShippable(_blame(function, error)) from error
    folder.joinpath(f"{name}.pkl").write_bytes(data)
    loader = folder / f"{name}.py"
    paths = [str(Path(path or ".").resolve()) for path in sys.path]
    loader.write_text(_LOADER.format(what=name, name=name, paths=paths), encoding="utf-8")
    return f"{loader}:{name}"


def unpack(loader: str, paths: list[str]) -> Any:
    """Load the pickle beside the file ``loader``.

    Args:
        paths: The program's ``sys.path``, on which the modules that the function imports are found.
    """
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
