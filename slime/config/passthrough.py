"""Flags that belong to other programs: those of engines' servers and of the router begin with a
name (``--sglang-*``, ``--router-*``), those of Megatron have their own names.

A plug-in registers the :class:`ProgramOptions` of its program, which are read from tables of the
pinned versions, so that parsing never imports these programs. ``tools/generate_flag_tables.py``
generates the tables. The values that the user sets are stored in ``args.sglang``, ``args.router``,
``args.megatron`` and so on: one dict for each program.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Required, TypedDict

from slime.config.files import read_json
from slime.config.flag import Flag, Kind, Loose
from slime.config.machine import version_of
from slime.registry import load, parts

Attributes = dict[str, Any]
"""The attributes of the arguments, ``vars(args)``."""

KEYS = frozenset(("api_key", "admin_api_key", "control_plane_api_keys"))
"""Options that slime does not pass on a command line; see :mod:`slime.engines.keys`."""

_TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "loose": Loose}


class TableEntry(TypedDict, total=False):
    """One option in a table."""

    kind: Required[Kind]
    dest: Required[str]  # the attribute name in the program
    type: str
    default: object
    choices: list[str | int]
    values: list[str | int]  # that this version accepts; slime's parser lets others pass
    field: str  # of Megatron's options: the config field of megatron-core that it sets


class Spelling(NamedTuple):
    """What one spelling of a flag stands for."""

    flag: (
        Flag  # of an option that is passed on, with the attribute name in the program that owns it
    )
    family: str | None  # of an option that is passed on
    sets: bool  # the value that a switch of this spelling sets

    def values(self, attributes: Attributes) -> Attributes:
        """Return where the value is stored, by the flag's name."""
        return attributes if self.family is None else attributes[self.family]


@dataclass(frozen=True)
class ProgramOptions:
    """The options of a program, for flags that begin with the name under which they are registered.

    Attributes:
        tables: The JSON files of the options in the pinned versions, newest first, as
            ``tools/generate_flag_tables.py`` writes them. Where versions differ, the newest one
            says what an option is.
        reasons: Options that slime refuses by status, each with the reason: ``set by slime``
            itself, or ``not supported`` because slime's own requests would fail with them.
        defaults: Defaults of slime for options, which the user's flags replace.
        context_length: The option of a server for the most tokens of prompt and response. A value
            that is no whole number leaves it to the model.
        has_prefix: Whether flags begin with the name of the program.
    """

    tables: tuple[Path, ...]
    reasons: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    context_length: str = "context_length"
    has_prefix: bool = True

    @property
    def by_version(self) -> dict[str, dict[str, TableEntry]]:
        """The options of each pinned version by their spelling, newest first."""
        return {table["version"]: table["options"] for table in map(read_json, self.tables)}

    @property
    def installed(self) -> str | None:
        """The version of the program on this machine; None if it is not installed."""
        return version_of(read_json(self.tables[0])["package"])

    def entries(self) -> dict[str, TableEntry]:
        """Return the options of the installed version, or of the newest one if that is not
        pinned.
        """
        known = self.by_version
        return known.get(self.installed or "", next(iter(known.values())))


def programs() -> dict[str, ProgramOptions]:
    """Return the owners of options by their names. One without a prefix comes last."""
    found = {name: load(part.target) for name, part in parts("options").items()}
    return dict(sorted(found.items(), key=lambda item: not item[1].has_prefix))


def prefix_of(family: str) -> str:
    """Return what the names of a program's options begin with in ``args`` and in files."""
    return f"{family}_" if programs()[family].has_prefix else ""


def spelled(family: str, name: str) -> str:
    """Return an option as it is typed: ``mem_fraction_static`` of SGLang is
    ``--sglang-mem-fraction-static``.
    """
    return "--" + (prefix_of(family) + name).replace("_", "-")


@functools.cache
def options() -> dict[str, Spelling]:
    """Return all pass-through options by their spelling on the command line."""
    found: dict[str, Spelling] = {}
    # Options without a prefix give way to those with one.
    for family, program in reversed(programs().items()):
        own: dict[str, Spelling] = {}
        for table in program.by_version.values():
            for spelling, entry in table.items():
                option = f"--{family}-{spelling[2:]}" if program.has_prefix else spelling
                own.setdefault(option, _option(family, option, entry))
        found |= own
    return found


def _option(family: str, option: str, entry: TableEntry) -> Spelling:
    kind = entry["kind"]
    is_bool = kind in ("switch", "negative", "toggle")
    flag = Flag(
        entry["dest"],
        option,
        kind,
        bool if is_bool else _TYPES[entry.get("type", "str")],
        entry.get("default"),
        family,
        fixed_choices=tuple(entry.get("choices", ())),
    )
    # The table lists both spellings of a toggle as one.
    no_form = kind == "toggle" and option.removeprefix(f"--{family}-").startswith("no-")
    return Spelling(flag, family, not no_form and kind != "negative")


@functools.cache
def by_name(family: str) -> dict[str, Spelling]:
    """Return the options of a program by attribute name; if an attribute has several spellings, the
    first.
    """
    found: dict[str, Spelling] = {}
    for option in options().values():
        if option.family == family:
            found.setdefault(option.flag.name, option)
    return found


def option_value(name: str, attributes: Mapping[str, object]) -> tuple[bool, object]:
    """Look up ``args.<name>`` as a pass-through option; returns ``(found, value)``. Defaults of a
    training backend's options are found only with that ``--train-backend``, but those of parallel
    sizes always.
    """
    for family, program in programs().items():
        prefix = prefix_of(family)
        short = name.removeprefix(prefix)
        if not name.startswith(prefix):
            continue
        given = attributes.get(family)
        if isinstance(given, dict) and short in given:
            return True, given[short]
        known = by_name(family).get(short)
        # FSDP has one rank on each of Megatron's axes, as the defaults say.
        is_used = attributes.get("train_backend") == family or "parallel_size" in short
        if known is not None and (is_used or family not in parts("backend")):
            return True, program.defaults.get(short, known.flag.default)
    return False, None


def every_value(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return all attributes of the arguments, but with the options of programs that were given by the
    names that files have for them.
    """
    hidden = ("explicit", "notices", *programs())
    return {name: value for name, value in attributes.items() if name not in hidden} | {
        prefix_of(program) + name: value
        for program in programs()
        for name, value in attributes[program].items()
    }


def given_options(attributes: Attributes, engine: str) -> dict[str, object]:
    """Return the options that were given for an engine; none if it has no own ones."""
    return {name: value for name, value in attributes.get(engine, {}).items() if name not in KEYS}


def check(values: Mapping[str, Any], engine: str) -> tuple[list[str], list[str]]:
    """Return the problems of options that slime sets itself, that cannot work, or that the
    installed engine lacks; and notices of those of engines that the run does not use.

    Args:
        values: The attributes of the arguments.
        engine: ``--rollout-backend``.
    """
    problems = []
    notices = []
    for family, program in programs().items():
        given = values[family]
        problems += [
            f"{spelled(family, name)} is {status}: {reasons[name]}"
            for status, reasons in program.reasons.items()
            for name in given
            if name in reasons
        ]
        if family == engine and program.installed in program.by_version:
            known = {entry["dest"] for entry in program.entries().values()}
            problems += [
                f"{spelled(family, name)}: the installed {family} {program.installed} does not "
                "have this option"
                for name in given
                if name not in known
            ]
        # Keys are for all engines; all other options are those of one engine.
        idle = sorted(given.keys() - KEYS)
        if idle and family in parts("engine") and family != engine:
            words = ", ".join(spelled(family, name) for name in idle)
            notices.append(f"{words}: no effect with --rollout-backend {engine}")
    return problems, notices


def command_line(family: str, given: Mapping[str, object]) -> list[str]:
    """Return the command-line words that pass ``given`` to the program that owns the options, in
    the spelling of its installed version.

    >>> command_line("sglang", {"mem_fraction_static": 0.7, "disable_radix_cache": True})
    ['--mem-fraction-static', '0.7', '--disable-radix-cache']
    """
    table = programs()[family].entries()
    spelling: dict[str, str] = {}
    for option, entry in table.items():
        # Of several spellings, the one that is the name of the attribute is taken.
        own = "--" + entry["dest"].replace("_", "-")
        spelling.setdefault(entry["dest"], own if own in table else option)
    words: list[str] = []
    for name, value in given.items():
        # not in the table: the owner rejects or takes it
        option = spelling.get(name) or "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words += _switch(option, table.get(option, {"kind": "switch", "dest": name}), value)
        elif isinstance(value, (list, tuple)):
            words += [option, *map(str, value)]
        else:
            words += [option, str(value)]
    return words


def _switch(option: str, entry: TableEntry, value: bool) -> list[str]:
    """Return the word that sets a switch to ``value``; none if it is its default."""
    if entry["kind"] == "toggle":
        # Without a default it is None, and the program decides.
        name = option if value else f"--no-{option[2:]}"
        return [] if value == entry.get("default") else [name]
    return [] if value == bool(entry.get("default", entry["kind"] == "negative")) else [option]
