"""``slime train`` and ``slime train-async``: the loops of train.py and train_async.py from an
installed package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slime.cli.errors import CommandError

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
