"""The subcommands, each with the function that adds its parser. Heavy packages are imported when a
command runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import TypeAlias

from slime.observability.files import shown

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""To what a command adds its parser."""


def print_report(as_json: bool, value: object, lines: Iterable[str]) -> None:
    """Print a result as JSON, or as its lines, without control characters of what was read."""
    if as_json:
        print(json.dumps(value, indent=2, default=_plain))
    else:
        print(*map(shown, lines), sep="\n")


def _plain(value: object) -> object:
    import torch

    return value.tolist() if isinstance(value, torch.Tensor) else str(value)
