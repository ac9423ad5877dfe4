"""slime: LLM post-training for RL scaling.

``slime.train`` and ``slime.Trainer`` train from Python, ``slime.Session`` has the primitives;
docs/en/python_api.md and docs/en/primitives.md describe them.
Importing this package imports neither torch nor Ray: the names below are loaded when they are first
used.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.api.functions import Callback as Callback
    from slime.api.run import Result as Result
    from slime.api.run import dry_run as dry_run
    from slime.api.run import train as train
    from slime.api.session import Session as Session
    from slime.api.trainer import Trainer as Trainer
    from slime.config.parser import ConfigError as ConfigError
    from slime.data.datum import Datum as Datum
    from slime.types import AdamSettings as AdamSettings

__version__ = "0.1.0"
_NAMES = {
    "AdamSettings": "slime.types",
    "Callback": "slime.api.functions",
    "ConfigError": "slime.config.parser",
    "Datum": "slime.data.datum",
    "Result": "slime.api.run",
    "Session": "slime.api.session",
    "Trainer": "slime.api.trainer",
    "dry_run": "slime.api.run",
    "train": "slime.api.run",
}


def _working_directory_last() -> None:
    """Put the working directory of a run, which Ray puts first, to the end of the import path of
    its processes.

    Users' modules are found there, but never in place of Python's own or of installed ones.
    """
    folder = os.environ.get("SLIME_WORKING_DIRECTORY")
    if folder and folder not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        sys.path[:] = [*(entry for entry in sys.path if entry != folder), folder]


def _require_standard_library() -> None:
    """Refuse files that hide modules of Python's standard library.

    Raises:
        ImportError: The message names the file.
    """
    for folder in sys.path:
        if folder == os.path.dirname(os.__file__):
            return
        try:
            names = os.listdir(folder or ".") if not folder.endswith("-packages") else []
        except OSError:  # the library as an archive, or an entry that does not exist
            continue
        for name in names:
            module, end = os.path.splitext(name)
            path = os.path.join(folder, name)
            code = end == ".py" or (not end and os.path.isfile(os.path.join(path, "__init__.py")))
            if (
                code
                and module in sys.stdlib_module_names
                and module not in ("test", "idlelib", "this")
            ):
                hides = f"{os.path.abspath(path)} hides Python's own module {module}"
                raise ImportError(
                    f"{hides}: rename it, or take its folder off the import path (PYTHONPATH)"
                )


_working_directory_last()
_require_standard_library()


def __getattr__(name: str) -> object:
    if name in _NAMES:
        value: object = getattr(importlib.import_module(_NAMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'slime' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
