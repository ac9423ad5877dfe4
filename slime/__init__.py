"""slime: LLM post-training for RL scaling.

``slime.train`` and ``slime.Trainer`` train from Python; docs/en/python_api.md describes them. Importing this package
imports neither torch nor Ray: the names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.api.callbacks import Callback as Callback
    from slime.api.result import Result as Result
    from slime.api.run import dry_run as dry_run
    from slime.api.run import train as train
    from slime.api.trainer import Trainer as Trainer
    from slime.config.parser import ConfigError as ConfigError

__version__ = "0.1.0"
_NAMES = {
    "Callback": "slime.api.callbacks",
    "ConfigError": "slime.config.parser",
    "Result": "slime.api.result",
    "Trainer": "slime.api.trainer",
    "dry_run": "slime.api.run",
    "train": "slime.api.run",
}


def __getattr__(name: str) -> object:
    if name in _NAMES:
        value: object = getattr(importlib.import_module(_NAMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'slime' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
