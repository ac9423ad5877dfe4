"""Find the user's function that a flag names."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class HookError(ValueError):
    """A hook path does not lead to a function; the message says what was tried and what is there."""


@functools.cache
def load_function(path: str, default_name: str | None = None) -> Any:
    """Resolve ``pkg.module.function``, ``pkg.module:function``, ``file.py:function`` or ``file.py``.

    Args:
        path: as typed on the command line.
        default_name: what a bare ``file.py`` means; without it, the file's only public function or
            class that is defined there.

    Raises:
        HookError: no such file, module or name.
    """
    if path.endswith(".py"):
        return _only_public(_load_file(path), path, default_name)
    head, colon, name = path.rpartition(":")
    if not colon:
        head, _, name = path.rpartition(".")
    if not head or not name:
        raise HookError(
            f"{path!r} names no function: write package.module.function, module:function or file.py:function"
        )
    module = _load_file(head) if head.endswith(".py") else _import(head, path)
    try:
        return getattr(module, name)
    except AttributeError:
        raise HookError(
            f"{path!r}: {head} has no {name!r}; it defines {', '.join(_public_names(module)) or 'nothing public'}"
        ) from None


def _import(module: str, path: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # a program that lies elsewhere, such as the slime command, has its own folder there
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            raise HookError(
                f"{path!r}: there is no module {error.name!r} on the import path (PYTHONPATH and the working directory)"
            ) from error
        raise


@functools.cache
def _load_file(path: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise HookError(f"hook file {path!r} does not exist (looked for {file})")
    name = f"slime_hook_{file.stem}_{abs(hash(str(file))):x}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles of the file's own classes look here
    spec.loader.exec_module(module)
    return module


def _public_names(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and getattr(value, "__module__", None) == module.__name__
    ]


def _only_public(module: ModuleType, path: str, default_name: str | None) -> Any:
    if default_name is not None and hasattr(module, default_name):
        return getattr(module, default_name)
    names = _public_names(module)
    if len(names) != 1:
        raise HookError(f"{path!r} defines {', '.join(names) or 'nothing public'}: say which one with {path}:NAME")
    return getattr(module, names[0])
