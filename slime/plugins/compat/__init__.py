"""Coming over from other frameworks: ``slime translate``, and names of older releases."""

from __future__ import annotations

import argparse

from slime.registry import register


def parts() -> None:
    """Register the subcommand, and what older releases had."""
    register("command", "translate", "slime.plugins.compat:add_translate")
    register(
        "missing flag",
        "older",
        "slime.plugins.compat.older:why_missing",
        flags="slime.plugins.compat.config:UnsupportedConfig",
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
