"""Support for a checkout of Megatron-LM on PYTHONPATH: its command-line flags, and its copy of megatron-core, which
must not replace the installed one.

The flags of megatron-core are known without the checkout (``passthrough``). Flags that only Megatron-LM has are read
from its parser, in a separate process and only if a flag is unknown otherwise. Their values become attributes of
``args`` for the user's own functions; slime's backend reads none of them, and a notice says so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ASK_SECONDS = 120.0
_MARK = "@@slime "
_TYPES: dict[str, type] = {"int": int, "float": float, "str": str}
_PROGRAM = f"""
import argparse, json
from megatron.training.arguments import add_megatron_arguments

parser = argparse.ArgumentParser(allow_abbrev=False)
add_megatron_arguments(parser)
said = []
for action in parser._actions:
    if action.dest != "help":
        kind = getattr(action.type, "__name__", "str")
        const = action.const if isinstance(action.const, (bool, int, float, str)) else None
        said.append([action.option_strings, action.dest, action.nargs, const, kind])
print({_MARK!r} + json.dumps(said))
"""


def is_there() -> bool:
    """Whether Megatron-LM can be imported. Nothing is imported for this."""
    spec = importlib.util.find_spec("megatron")
    places = (spec.submodule_search_locations or []) if spec else []
    return any((Path(place) / "training" / "arguments.py").is_file() for place in places)


def add_options(parser: argparse.ArgumentParser) -> str | None:
    """Add those options of Megatron-LM that ``parser`` does not have. Return the problem, or None."""
    command = [sys.executable, "-P", "-c", _PROGRAM]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"Megatron-LM on PYTHONPATH did not list its flags within {ASK_SECONDS:.0f} s"
    said = next((line for line in answer.stdout.splitlines() if line.startswith(_MARK)), None)
    if said is None:
        last = answer.stderr.strip().splitlines()[-1:] or [f"exit {answer.returncode}"]
        return f"the flags of Megatron-LM on PYTHONPATH could not be read: {last[0]}"
    for options, dest, nargs, const, kind in json.loads(said.removeprefix(_MARK)):
        new = [option for option in options if option not in parser._option_string_actions]
        common: dict[str, Any] = {"dest": dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if new and nargs == 0:
            parser.add_argument(*new, action="store_const", const=const, **common)
        elif new:
            parser.add_argument(*new, nargs=nargs, type=_TYPES.get(kind, str), **common)
    return None


def installed_core() -> Path | None:
    """Return the folder that contains the ``megatron`` package of the installed megatron-core distribution.

    It is None if no distribution lists the files of ``megatron/core``: megatron-core is not installed, or installed in
    editable mode.
    """
    for distribution in importlib.metadata.distributions(name="megatron-core"):
        if "megatron/core/__init__.py" in (distribution.read_text("RECORD") or ""):
            return Path(str(distribution.locate_file(""))).resolve()
    return None


def shadowing_paths() -> list[str]:
    """Return the entries of ``sys.path`` whose ``megatron.core`` would be imported instead of the installed one."""
    installed = installed_core()
    found = []
    is_before = True
    for entry in sys.path if installed else []:
        folder = Path(entry or ".").resolve()
        if folder == installed:
            is_before = False
        elif (folder / "megatron" / "__init__.py").is_file():
            # Python prefers a regular package to namespace packages, wherever it is on the path.
            found.append(entry)
        elif is_before and (folder / "megatron" / "core").is_dir():
            found.append(entry)
    return found


def prefer_installed_core() -> list[str]:
    """Make ``import megatron.core`` find the installed distribution, and return the paths that shadowed it.

    A checkout whose ``megatron`` is a namespace package moves to the end of ``sys.path``, so that ``megatron.training``
    can still be imported from it. One whose ``megatron`` is a regular package is removed.
    """
    shadowing = shadowing_paths()
    for entry in shadowing:
        sys.path.remove(entry)
        if not (Path(entry or ".") / "megatron" / "__init__.py").is_file():
            sys.path.append(entry)
    return shadowing


def shadowing_notice() -> str | None:
    """Return a notice about :func:`shadowing_paths`; None if there are none."""
    paths = shadowing_paths()
    if not paths:
        return None
    version = importlib.metadata.version("megatron-core")
    return (
        f"{', '.join(paths)} on PYTHONPATH contains its own megatron.core, which slime does not use: it imports the "
        f"installed megatron-core {version}, with which it is tested"
    )
