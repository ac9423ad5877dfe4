"""Files of a folder that somebody else may have made."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def regular(path: Path) -> Path:
    """Return ``path``, unless reading it would wait for another process or never end, as with a pipe or a device.

    Raises:
        OSError: There is no such file, or it is neither a regular file nor a folder (which cannot be opened either).
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return path
