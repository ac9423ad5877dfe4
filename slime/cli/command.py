"""What subcommands share: their error, and types of options: numbers in a range. argparse says what is
wrong with these, and the command exits with 2.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CommandError(Exception):
    """An error for the user, which is printed without a traceback. The message says what is wrong
    and what to do.
    """


@contextmanager
def writing(what: object) -> Iterator[None]:
    """Turn an ``OSError`` of the block, which writes ``what``, into a message."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"cannot write {what}: {error.strerror or error}") from error


def whole(low: int, high: int = 10**9) -> Callable[[str], int]:
    """Return a function that reads an integer from ``low`` to ``high``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:80]!r} is no integer") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, not {text[:80]}")
        return value

    return read


def finite(low: float, high: float = 1e12, above: bool = False) -> Callable[[str], float]:
    """Return a function that reads a finite number from ``low`` to ``high``; without ``low`` itself
    if ``above``.
    """

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a number") from None
        if not low <= value <= high or (above and value == low) or math.isnan(value):
            which = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"must be {which}, not {text[:80]}")
        return value

    return read
