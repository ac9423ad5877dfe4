"""Megatron's flags on both backends: which ones are read, which ones have no effect, and which ones
are refused.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.files import read_table
from slime.config.hf_config import SHAPE
from slime.config.passthrough import MEGATRON_VERSION, by_name, load_table

if TYPE_CHECKING:
    from slime.config.args import Args

_TABLE = read_table("passed_on.json")["megatron"]
READ_BY_SLIME = frozenset(_TABLE["read"])
"""Flags that the Megatron backend reads itself, or that repeat values of config.json."""
ARCHITECTURE = frozenset(_TABLE["architecture"])
"""Flags that describe the model. FSDP takes all of this from the checkpoint's code and
config.json.
"""
WITHOUT_EFFECT = frozenset(_TABLE["without_effect"])
"""Flags that choose between equivalent kernels, or that concern what slime decides itself. The
results do not depend on them."""
PERFORMANCE: dict[str, str] = _TABLE["performance"]
"""Flags that change speed or memory and no result, and what the Megatron backend does instead. A
notice says so.
"""
REFUSED: dict[str, str] = _TABLE["refused"]
"""Flags that the Megatron backend cannot support, with the reasons."""


def fields_by_dest() -> dict[str, str]:
    """Map attributes of Megatron-LM to config fields of megatron-core where the names differ."""
    table = load_table("megatron_lm", MEGATRON_VERSION)
    return {entry["dest"]: entry["field"] for entry in table.values() if "field" in entry}


def idle_megatron_flags(given: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the given flags of :data:`PERFORMANCE`, each with what happens instead."""
    return [
        (f"--{name.replace('_', '-')}", instead)
        for name, instead in PERFORMANCE.items()
        if given.get(name) not in (None, False, "none")
    ]


def refused_flags(given: dict[str, Any]) -> list[str]:
    """Report given flags that the Megatron backend cannot support or does not read."""
    problems = [
        f"--{name.replace('_', '-')} {given[name]} is not supported by --train-backend megatron: "
        f"{why}"
        for name, why in REFUSED.items()
        if given.get(name) not in (None, False, 0, 0.0, "none")
    ]
    # The layers follow from config.json. A spec of the user would be ignored in silence.
    other = [name for name in given.get("spec") or [] if name not in _TABLE["specs"]]
    if other:
        problems.append(
            f"--spec {' '.join(other)}: slime supports only its built-in layers; leave it out"
        )
    known = READ_BY_SLIME | WITHOUT_EFFECT | set(PERFORMANCE) | set(REFUSED) | set(fields_by_dest())
    known |= set(load_table("megatron_core", MEGATRON_VERSION))
    problems += [
        f"--{name.replace('_', '-')}: --train-backend megatron does not read it; leave it out"
        for name in given
        if name not in known
    ]
    return problems


def check_megatron(args: Args) -> list[str]:
    """Check the flags of Megatron for its backend: those that do not fit, and those that it cannot
    support. A notice names a checkout of Megatron-LM whose ``megatron.core`` is not used."""
    if args.train_backend != "megatron":
        return []
    if notice := shadowing_notice():
        args.notices.append(notice)
    return refused_flags(args.megatron)


def check_fsdp(args: Args) -> list[str]:
    """Check the number of shards, and name Megatron's flags that have no effect in one notice."""
    if args.train_backend != "fsdp":
        return []
    # FSDP reads the shape from config.json, which the checks compare with these flags.
    known = {*SHAPE, *ARCHITECTURE, *_TABLE["understood_by_fsdp"]}
    defaults = {name: entry.flag.default for name, entry in by_name("megatron").items()}
    # what FSDP does anyway needs no notice
    as_usual = {**defaults, "attention_dropout": 0, "hidden_dropout": 0}
    idle = [
        name
        for name, value in args.megatron.items()
        if name not in known and value != as_usual[name]
    ]
    if idle:
        shown = ", ".join("--" + name.replace("_", "-") for name in sorted(idle))
        args.notices.append(
            f"these Megatron flags have no effect with --train-backend fsdp: {shown}"
        )
    return _shard_size(args.fsdp_shard_size, args.world_size)


def _shard_size(size: int | None, ranks: int) -> list[str]:
    if size is None or size < 1 or ranks % size == 0:  # the range check reports a size below 1
        return []
    sizes = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
    return [
        f"--fsdp-shard-size {size} does not divide the {ranks} training ranks: use one of "
        f"{sizes}, or leave it out"
    ]


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
    """Add those options of Megatron-LM that ``parser`` does not have. Return the problem, or
    None.
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


def installed_core() -> Path | None:
    """Return the folder that contains the ``megatron`` package of the installed megatron-core
    distribution.

    It is None if no distribution lists the files of ``megatron/core``: megatron-core is not
    installed, or installed in editable mode.
    """
    for distribution in importlib.metadata.distributions(name="megatron-core"):
        if "megatron/core/__init__.py" in (distribution.read_text("RECORD") or ""):
            return Path(str(distribution.locate_file(""))).resolve()
    return None


def shadowing_paths() -> list[str]:
    """Return the entries of ``sys.path`` whose ``megatron.core`` would be imported instead of the
    installed one.
    """
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
    """Make ``import megatron.core`` find the installed distribution, and return the paths that
    shadowed it.

    A checkout whose ``megatron`` is a namespace package moves to the end of ``sys.path``, so that
    ``megatron.training`` can still be imported from it. One whose ``megatron`` is a regular package
    is removed.
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
        f"{', '.join(paths)} on PYTHONPATH contains its own megatron.core, which slime does not "
        f"use: it imports the installed megatron-core {version}, with which it is tested"
    )
