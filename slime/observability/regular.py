"""Files of a folder that somebody else may have made: what is read of them is bounded in size and
depth.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from slime.data.json_text import MOST_NESTED, too_deep

MOST_BYTES = 2**31
"""So many bytes of a file, or of what a compressed one holds, are read at most."""
MOST_SETTINGS = 2**22
LONGEST_LINE = 2**26
DEEPEST = MOST_NESTED
"""So many levels may settings and rows be nested. Deeper ones overflow the stack of a parser or of
a writer.
"""
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def regular(path: Path, most: int = MOST_BYTES) -> Path:
    """Return ``path``, unless reading it would wait for another process or never end, as with a
    pipe or a device.

    Raises:
        OSError: There is no such file, it has more than ``most`` bytes, or it is neither a regular
            file nor a folder (which cannot be opened either).
    """
    status = os.stat(path)
    # Files of the kernel call themselves regular, but have no end, or do something when they are
    # read.
    of_kernel = any(
        os.path.isdir(place) and os.stat(place).st_dev == status.st_dev
        for place in ("/proc", "/sys")
    )
    if of_kernel or not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    if status.st_size > most and stat.S_ISREG(status.st_mode):
        raise OSError(errno.EFBIG, f"It has more than {most:,} bytes", str(path))
    return path


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is not valid, or is nested too deeply.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return shallow(value)


def shallow(value: object) -> Any:
    """Return a value of JSON types, unless it is nested more than :data:`DEEPEST` levels deep.

    Raises:
        ValueError: It is.
    """
    if too_deep(value):
        raise ValueError("it is nested too deeply")
    return value


def parse_settings(text: str) -> Any:
    """Return the value of a YAML text, whose size the caller has bounded.

    Raises:
        ValueError: It is not valid, is nested too deeply, or has aliases, which can stand for any
            number of values.
        yaml.YAMLError: It is not valid.
    """
    import yaml

    # The C parser is ten times faster, but has no limit of depth: it overflows the stack.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it has an alias (*{event.anchor})")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
    return yaml.load(text, Loader=loader)


def shown(text: object) -> str:
    """Return a text for the terminal: control characters, with which it can be commanded, are
    replaced.
    """
    return _UNPRINTABLE.sub("�", str(text))
