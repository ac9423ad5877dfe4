"""The error of subcommands."""

from __future__ import annotations

from collections.abc import Iterator
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
