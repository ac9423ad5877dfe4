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
    table: dict[str, dict[str, Any]] = read_json(Path(__file__).with_name("unsupported.json"))
    fields = [
        (
            name,
            _TYPES[entry["type"]],
            flag(**{key: value for key, value in entry.items() if key != "type"}),
        )
        for name, entry in table.items()
    ]
    return dataclasses.make_dataclass(
        "UnsupportedConfig", fields, bases=(Section,), namespace={"_title": "not supported"}
    )


UnsupportedConfig = _unsupported()
