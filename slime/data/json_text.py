"""JSON from models, clients and data files: checks whether a value can be passed on safely."""

from __future__ import annotations

import json
import math
from typing import Any, TypeVar

T = TypeVar("T")
MOST_NESTED = 100
"""Maximum nesting of objects and lists. Chat templates, ``json`` and ``copy.deepcopy`` are
recursive, and Python's stack is limited to about 1,000 frames."""
_SURROGATES = {code: "\ufffd" for code in range(0xD800, 0xE000)}


def too_deep(value: object) -> bool:
    """Whether a JSON value nests more than :data:`MOST_NESTED` levels."""
    level = [value]
    for _ in range(MOST_NESTED):
        # Only objects and lists, so that long lists of numbers cost one pass.
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def clean(value: T) -> T:
    """Replace unpaired surrogates in a JSON value by U+FFFD: JSON text can hold them
    (``"\\ud83d"``), UTF-8 cannot.
    """
    if isinstance(value, str):
        return value.translate(_SURROGATES) if not value.isascii() else value  # type: ignore[return-value]
    if isinstance(value, list):
        return [clean(item) for item in value]  # type: ignore[return-value]
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}  # type: ignore[return-value]
    return value


def parse_json(text: str) -> Any:
    """Parse a JSON value such that it can be passed on: with bounded depth, finite numbers and
    whole characters.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or has a number that is not finite.
    """
    try:
        value = DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if too_deep(value):
        raise ValueError("nested too deeply")
    return clean(value)


def no_constant(name: str) -> Any:
    """Refuse NaN and infinities, which Python's reader takes for numbers."""
    raise ValueError(f"{name} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is too large for a number")
    return value


DECODER = json.JSONDecoder(parse_constant=no_constant, parse_float=_finite)
"""Reads JSON with finite numbers only. The depth is not limited, so callers must catch
:class:`RecursionError`.
"""


def metadata_of(value: object) -> dict[str, Any]:
    """Convert None or the JSON text of an object, as users' functions and data sources assign it,
    to a dict.

    Raises:
        ValueError: It is something else.
    """
    try:
        given = (parse_json(value) if value.strip() else None) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"Sample.metadata is a text that is not valid JSON: {error}") from error
    if given is not None and not isinstance(given, dict):
        raise ValueError(
            f"Sample.metadata must be a dict, or the JSON text of an object, not {value!r:.100}"
        )
    return {} if given is None else given
