"""The ``slime`` command. Subcommands are registered parts, which import their modules only when
they run. ``slime train`` and ``slime train-async`` are the loops of train.py and train_async.py from
an installed package.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from slime.cli.command import CommandError
from slime.registry import find, parts


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status (1 if the command failed; wrong usage exits
    with 2).
    """
    # An output whose encoding lacks a character, as in a container without a locale, shows a "?".
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    words = sys.argv[1:] if argv is None else list(argv)
    # The training commands have a parser of their own, whose flags this one would take for its own
    # (--help).
    flags = words[1:] if words and words[0] in TRAINING else []
    # Words that no option takes are flags of a run, if the command has a run.
    options, rest = build_parser().parse_known_args(words[:1] if flags else words)
    if rest and not getattr(options, "takes_flags", False):
        build_parser().parse_args(words)  # prints the error and exits
    options.rest = flags or rest
    from slime.observability.files import shown

    try:
        return int(options.run(options) or 0)
    except CommandError as error:
        print(shown(f"slime {options.command}: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"slime {options.command}: interrupted", file=sys.stderr)
        return 130


TRAINING = {
    "train": "train a model; the same as python train.py (slime train --help lists the flags)",
    "train-async": "the same while the next rollouts are generated; the same as python train_async.py",
}
"""The commands whose words are the flags of a run, with their help."""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser. Each subcommand has a subparser, which sets ``run`` to its function, and
    ``takes_flags`` if words that it does not know are flags of a run (``options.rest``)."""
    parser = argparse.ArgumentParser(prog="slime", description="LLM post-training for RL scaling.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, what in TRAINING.items():
        commands.add_parser(name, help=what, add_help=False, allow_abbrev=False).set_defaults(
            run=_train
        )
    for name in parts("command"):
        find("command", name)(commands)
    return parser


def _train(args: argparse.Namespace) -> int:
    return run_loop(args.command, args.rest)


LOOPS = {"train": "train.py", "train-async": "train_async.py"}
"""The file of each command."""


def run_loop(command: str, flags: Sequence[str]) -> int:
    """Do what ``python train.py <flags>`` does.

    Raises:
        CommandError: The file of the loop is missing.
        SystemExit: The flags are wrong (2), or the run was stopped (130, 143).
    """
    from slime.cluster.checks import parse_and_check
    from slime.cluster.run import load_loop

    try:
        loop = load_loop(LOOPS[command])
    except FileNotFoundError as error:
        raise CommandError(str(error)) from error
    # The flags are read from sys.argv and not passed on, because only a command line can be run
    # again after a loss (--max-restarts). The first word is the name in messages.
    sys.argv = [f"slime {command}", *flags]
    loop.train(parse_and_check(asynchronous=command == "train-async"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
