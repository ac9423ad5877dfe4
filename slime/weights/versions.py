"""Weight versions: ``attempt.step``.

``attempt`` counts the starts of a run (0, and one more for each resume), ``step`` the steps that had trained these
weights: step ``i`` trains version ``i``. After a resume a version is therefore never met twice with other weights.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_PATTERN = re.compile(r"(\d+)\.(\d+)")


class Version(NamedTuple):
    attempt: int
    step: int

    def __str__(self) -> str:
        return f"{self.attempt}.{self.step}"


def parse_version(text: str) -> Version:
    """Read ``"attempt.step"``; versions compare in the order in which they were made.

    Raises:
        ValueError: ``text`` is something else, for example the version of an engine that was never updated.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"weight version {text!r} is not of the form attempt.step, for example 0.12")
    return Version(int(match[1]), int(match[2]))
