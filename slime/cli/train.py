"""``slime train`` and ``slime train-async``: the loops of train.py and train_async.py from an
installed package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from slime.cli.errors import CommandError
from slime.config.hooks import module_of_file

LOOPS = {"train": "train.py", "train-async": "train_async.py"}
"""The file of each command. A wheel has them in ``slime/cli/loops``, a checkout at its top."""


def run_loop(command: str, flags: Sequence[str]) -> int:
    """Do what ``python train.py <flags>`` does.

    Raises:
        CommandError: The file of the loop is missing.
        SystemExit: The flags are wrong (2), or the run was stopped (130, 143).
    """
    from slime.cluster.checks import parse_and_check

    loop = load_loop(LOOPS[command])
    # The flags are read from sys.argv and not passed on, because only a command line can be run
    # again after a loss (--max-restarts). The first word is the name in messages.
    sys.argv = [f"slime {command}", *flags]
    loop.train(parse_and_check(asynchronous=command == "train-async"))
    return 0


def load_loop(name: str) -> ModuleType:
    """Import a file of :data:`LOOPS`.

    Raises:
        CommandError: It is neither in the package nor at the top of a checkout.
    """
    here = Path(__file__).resolve()
    places = (here.parent / "loops" / name, here.parents[2] / name)
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise CommandError(
            f"{name} is missing, neither {places[0]} nor {places[1]} exists: install slime again"
        )
    return module_of_file(f"slime_loop_{file.stem}", file)
