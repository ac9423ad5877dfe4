"""What is found of a Megatron-LM, without torch: the flags of the one on ``PYTHONPATH``, which users'
functions may read, and a checkpoint in a folder that it wrote with ``--ckpt-format torch_dist``.

Such a folder has a tracker file and a folder per iteration::

    X/latest_checkpointed_iteration.txt      "100", or "release" for converted weights
    X/iter_0000100/.metadata, *.distcp, common.pt, metadata.json
    X/release/...
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TRACKER = "latest_checkpointed_iteration.txt"
_OF_SLIME = ("manifest.json", "trainer.json", "actor")


def folder_of(path: str, step: int | None) -> Path | None:
    """Return the folder of a checkpoint of Megatron-LM whose weights can be read; None if there is
    none.

    Args:
        path: The folder with the tracker file, or the folder of one iteration (``.metadata`` and
            ``*.distcp``).
        step: The iteration to select. Default: that of the tracker file, or the newest one if there
            is no such file.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir() or (folder / "config.json").is_file():
        return None
    if _is_readable(folder):
        return folder
    return next((chosen for chosen in _candidates(folder, step) if _is_readable(chosen)), None)


def _candidates(folder: Path, step: int | None) -> list[Path]:
    if step is not None:
        return [folder / f"iter_{step:07d}"]
    tracker = folder / _TRACKER
    named = tracker.read_text(errors="replace").strip() if tracker.is_file() else None
    if named is None:
        return [*sorted(folder.glob("iter_*"), reverse=True), folder / "release"]
    return [folder / (f"iter_{int(named):07d}" if named.isdecimal() else "release")]


def _is_readable(folder: Path) -> bool:
    """Whether a folder has an index and tensors of ``torch_dist``, and slime did not write it."""
    if any((folder / name).exists() for name in _OF_SLIME) or not (folder / ".metadata").is_file():
        return False
    return next(folder.glob("*.distcp"), None) is not None


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


def find() -> Callable[[argparse.ArgumentParser], str | None] | None:
    """Return :func:`add_options` if Megatron-LM can be imported. Nothing is imported for this."""
    spec = importlib.util.find_spec("megatron")
    places = (spec.submodule_search_locations or []) if spec else []
    there = any((Path(place) / "training" / "arguments.py").is_file() for place in places)
    return add_options if there else None


def add_options(parser: argparse.ArgumentParser) -> str | None:
    """Add those options of Megatron-LM that ``parser`` does not have. Return the problem, or None.

    This imports Megatron-LM in a process of its own, which takes seconds.
    """
    command = [sys.executable, "-P", "-c", _PROGRAM]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"Megatron-LM on PYTHONPATH did not list its flags within {ASK_SECONDS:.0f} s"
    # Imports of Megatron-LM print to the same stream, so the answer has a mark.
    said = next((line for line in answer.stdout.splitlines() if line.startswith(_MARK)), None)
    if said is None:
        last = answer.stderr.strip().splitlines()[-1:] or [f"exit {answer.returncode}"]
        return f"the flags of Megatron-LM on PYTHONPATH could not be read: {last[0]}"
    for options, dest, nargs, const, kind in json.loads(said.removeprefix(_MARK)):
        new = [option for option in options if option not in parser._option_string_actions]
        common: dict[str, Any] = {
            "dest": dest,
            "default": argparse.SUPPRESS,
            "help": argparse.SUPPRESS,
        }
        if new and nargs == 0:
            parser.add_argument(*new, action="store_const", const=const, **common)
        elif new:
            parser.add_argument(*new, nargs=nargs, type=_TYPES.get(kind, str), **common)
    return None
