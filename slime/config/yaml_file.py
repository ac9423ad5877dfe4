"""YAML files that users name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def load_yaml(file: Path) -> Any:
    """The content of a YAML file in UTF-8, with plain types only.

    Raises:
        ValueError: it is none.
        OSError: it cannot be read.
    """
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start}): save the file as UTF-8") from error
    except RecursionError:
        raise ValueError("not YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from error
