"""Megatron's flags on both backends: which ones are read, which ones have no effect, and which ones
are refused.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.config.files import read_table
from slime.config.hf_config import SHAPE
from slime.config.passthrough import MEGATRON_VERSION, by_name, load_table

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


def fsdp_notices(given: Mapping[str, Any]) -> list[str]:
    """Name Megatron's flags that have no effect with FSDP in one notice."""
    # FSDP reads the shape from config.json, which the checks compare with these flags.
    known = {*SHAPE, *ARCHITECTURE, *_TABLE["understood_by_fsdp"]}
    defaults = {name: entry.flag.default for name, entry in by_name("megatron").items()}
    # what FSDP does anyway needs no notice
    as_usual = {**defaults, "attention_dropout": 0, "hidden_dropout": 0}
    idle = [name for name, value in given.items() if name not in known and value != as_usual[name]]
    if not idle:
        return []
    shown = ", ".join("--" + name.replace("_", "-") for name in sorted(idle))
    return [f"these Megatron flags have no effect with --train-backend fsdp: {shown}"]


def check_shard_size(size: int | None, ranks: int) -> list[str]:
    if size is None or size < 1 or ranks % size == 0:  # the range check reports a size below 1
        return []
    sizes = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
    return [
        f"--fsdp-shard-size {size} does not divide the {ranks} training ranks: use one of "
        f"{sizes}, or leave it out"
    ]


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


def shadowing_notices() -> list[str]:
    """Return a notice about :func:`shadowing_paths`, if there are any."""
    paths = shadowing_paths()
    if not paths:
        return []
    version = importlib.metadata.version("megatron-core")
    return [
        f"{', '.join(paths)} on PYTHONPATH contains its own megatron.core, which slime does not "
        f"use: it imports the installed megatron-core {version}, with which it is tested"
    ]
