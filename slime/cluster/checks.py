"""Everything that can be known to be wrong before a process starts, reported together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.config.args import Args


def parse_and_check(argv: Sequence[str] | None = None, asynchronous: bool = False) -> Args:
    """Flags, files, rows and labels; prints all problems and exits with 2 if there are any."""
    from slime.config.parser import parse_args

    checks = (_check_data, _check_async) if asynchronous else (_check_data,)
    words = list(argv) if argv is not None else None
    return parse_args(words, asynchronous=asynchronous, extra_checks=checks)


def _check_async(args: Args) -> list[str]:
    if args.colocate:
        return ["train_async.py needs GPUs of their own for the engines: drop --colocate, or use train.py"]
    return []


def _check_data(args: Args) -> list[str]:
    from slime.data.validate import check_data

    return check_data(args)
