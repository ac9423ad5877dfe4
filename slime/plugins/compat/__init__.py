"""Coming over from other frameworks: ``slime translate``, checkpoints of Megatron-LM, and names of
older releases.
"""

from __future__ import annotations

import argparse

from slime.registry import register


def parts() -> None:
    """Register the subcommand and the reader."""
    register("command", "translate", "slime.plugins.compat:add_translate")
    register("checkpoint", "megatron_lm", "slime.plugins.compat.megatron_lm:MegatronLmWeights")


def add_translate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    translate = commands.add_parser(
        "translate",
        help="print the command for a launch script of slime 0.3, verl, OpenRLHF or TRL, and what "
        "changes",
        usage="slime translate SCRIPT.sh | slime translate -- COMMAND ...",
        description="Reads a bash script without running it, or the words of a command.",
        allow_abbrev=False,
    )
    translate.add_argument("words", nargs=argparse.REMAINDER, help="a script, or a command")
    translate.set_defaults(run=_translate, takes_flags=True)


def _translate(args: argparse.Namespace) -> int:
    from slime.plugins.compat.translate import translate

    return translate([*args.words, *args.rest])
