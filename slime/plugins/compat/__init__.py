"""Coming over from other frameworks: ``slime translate``, and names of older releases."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from slime.config.files import read_json
from slime.config.flag import Section, flag
from slime.registry import register

_TYPES: dict[str, Any] = {"list of int": list[int], "list of str": list[str]}
_TYPES |= {kind.__name__: kind for kind in (int, float, str, bool)}


def _unsupported() -> type:
    """Make the flags of the original interface that slime refuses or ignores. They remain
    attributes of Args.
    """
    fields = []
    for name, entry in read_json(Path(__file__).with_name("unsupported.json")).items():
        declared = dict(entry)
        kind = _TYPES[declared.pop("type")]
        fields.append((name, kind | None if entry["default"] is None else kind, flag(**declared)))
    return dataclasses.make_dataclass(
        "UnsupportedConfig", fields, bases=(Section,), namespace={"_title": "not supported"}
    )


UnsupportedConfig = _unsupported()


def parts() -> None:
    """Register the subcommand, and what older releases had."""
    register("command", "translate", "slime.plugins.compat:add_translate")
    register(
        "missing flag",
        "older",
        "slime.plugins.compat.older:why_missing",
        flags=UnsupportedConfig,
    )
    register("client", "keys", "slime.plugins.compat.clients:send_keys_too")
    register("check", "older releases", "slime.plugins.compat.older:tell")


def add_translate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    translate = commands.add_parser(
        "translate",
        help="print the command for a launch script of slime 0.3, verl, OpenRLHF, TRL or prime-rl, "
        "and what changes",
        usage="slime translate SCRIPT.sh [ARGUMENTS ...] | slime translate -- COMMAND ...",
        description="Runs a bash script where it can change nothing, with recorders in place of "
        "python, ray and other programs, or reads the words of a command.",
        allow_abbrev=False,
    )
    translate.add_argument("words", nargs=argparse.REMAINDER, help="a script, or a command")
    translate.set_defaults(run=_translate, takes_flags=True)


def _translate(args: argparse.Namespace) -> int:
    from slime.plugins.compat.translate import translate

    return translate([*args.words, *args.rest])
