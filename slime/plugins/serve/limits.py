"""What a tenant may use: models, tokens a minute, disk."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from slime.cli.command import CommandError
from slime.plugins.http.server import Refused


@dataclass(frozen=True)
class Limits:
    """The limits of a tenant; None for none.

    Attributes:
        models: Models that are trained at a time.
        tokens_per_minute: Tokens that are trained on, scored, read as prompts, or asked for.
        disk_mb: Megabytes (10⁶ bytes) of saved weights and states.
    """

    models: int | None = None
    tokens_per_minute: int | None = None
    disk_mb: int | None = None

    @classmethod
    def of(cls, name: str, given: Mapping[str, object], models: int) -> Limits:
        """Return the limits that a tenant's entry of the file of keys has.

        Args:
            models: The limit of models, if the entry has none.

        Raises:
            CommandError: An entry is unknown, or no positive whole number.
        """
        known = [one.name for one in fields(cls)]
        for key, value in given.items():
            if key not in known:
                raise CommandError(
                    f"--keys: {name} has {key!r}: a tenant has key, {', '.join(known)}"
                )
            if type(value) is not int or value < 1:
                raise CommandError(
                    f"--keys: {key} of {name} must be a positive whole number, not {value!r}"
                )
        return cls(**{"models": models, **given})  # type: ignore[arg-type]  # checked above


class OverLimit(Refused):
    """A tenant has used what it may.

    Args:
        seconds: When the same request can succeed; None if time alone does not help.
    """

    def __init__(self, message: str, seconds: int | None = None) -> None:
        # the client waits after 429, and gives up after 403
        super().__init__(message, 403 if seconds is None else 429)
        self.seconds = seconds
        self.headers = None if seconds is None else {"Retry-After": str(seconds)}


class Meter:
    """The tokens of a tenant: a bucket that holds those of a minute, and fills steadily."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left = float(limit)
        self.since = time.monotonic()

    def take(self, tokens: int) -> None:
        """Take the tokens of a request.

        Raises:
            OverLimit: There are not as many.
        """
        if tokens > self.limit:
            raise OverLimit(
                f"the request has {tokens} tokens, and this tenant {self.limit} a minute: divide it"
            )
        now = time.monotonic()
        self.left = min(self.limit, self.left + (now - self.since) * self.limit / 60)
        self.since = now
        if tokens > self.left:
            seconds = math.ceil((tokens - self.left) * 60 / self.limit)
            raise OverLimit(
                f"this tenant has {self.limit} tokens a minute: come back in {seconds} s", seconds
            )
        self.left -= tokens


def check_disk(limit_mb: int, folders: list[Path]) -> None:
    """Check that there is room for more.

    Raises:
        OverLimit: The files have reached the limit.
    """
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    used = sum(file.stat().st_size for file in files) / 1e6
    if used >= limit_mb:
        raise OverLimit(
            f"this tenant has {used:.0f} MB on disk, of {limit_mb}: delete checkpoints, or save "
            "with ttl_seconds"
        )
