"""Flags of the original interface that slime refuses or ignores, with the reasons."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from slime.config.files import read_json
from slime.config.flag import Section, flag

_TYPES: dict[str, Any] = {"list of int": list[int], "list of str": list[str]}
_TYPES |= {kind.__name__: kind for kind in (int, float, str, bool)}


def _unsupported() -> type:
    """Make the flags of the original interface that slime refuses or ignores. They remain
    attributes of Args.
    """
    fields = []
    for name, entry in read_json(Path(__file__).with_name("unsupported.json")).items():
        declared = dict(entry)
        kind = _TYPES[declared.pop("type")]
        fields.append((name, kind | None if entry["default"] is None else kind, flag(**declared)))
    return dataclasses.make_dataclass(
        "UnsupportedConfig", fields, bases=(Section,), namespace={"_title": "not supported"}
    )


UnsupportedConfig = _unsupported()
