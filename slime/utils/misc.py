"""Documented import path of small helpers for plugins."""

from __future__ import annotations

import threading
from typing import Any

from slime.config.hooks import load_function

__all__ = ["SingletonMeta", "load_function"]


class SingletonMeta(type):
    """Metaclass of classes with one instance per process, which the first call creates.

    It is for plugins; slime itself passes objects as arguments. :meth:`clear` is for tests.
    """

    _instances: dict[type, Any] = {}  # noqa: RUF012  # shared by all classes on purpose
    _lock = threading.RLock()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        with SingletonMeta._lock:
            if cls not in SingletonMeta._instances:
                SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
            return SingletonMeta._instances[cls]

    def clear(cls) -> None:
        """Remove the instance of this class, so that the next call creates a new one."""
        with SingletonMeta._lock:
            SingletonMeta._instances.pop(cls, None)
