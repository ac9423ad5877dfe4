"""``with open_run(args) as run:`` start a run, and end it whatever happens inside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime.cluster.end import RunEnd
from slime.cluster.start import prepare, start

if TYPE_CHECKING:
    from slime.cluster.phases import Run
    from slime.config.args import Args


@contextlib.contextmanager
def open_run(args: Args, asynchronous: bool = False) -> Iterator[Run]:
    """Start engines and trainer, and shut them down at the end, after an error, or when the user stops the run.

    Args:
        asynchronous: rollouts are generated while the one before trains (``train_async.py``).

    Raises:
        SystemExit: 130 or 143 after Ctrl-C or SIGTERM.
    """
    parts = prepare(args)
    with RunEnd(args, parts):
        yield start(args, asynchronous, parts)
