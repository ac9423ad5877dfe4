"""Documented import path of small helpers that plugins use."""

from __future__ import annotations

import threading
from typing import Any

from slime.config.hooks import load_function

__all__ = ["SingletonMeta", "load_function"]


class SingletonMeta(type):
    """Metaclass of classes with one instance per process, made by the first call.

    For plugins; slime itself passes its objects on. :meth:`clear` is for tests.
    """

    _instances: dict[type, Any] = {}  # noqa: RUF012  # shared on purpose
    _lock = threading.RLock()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        with SingletonMeta._lock:
            if cls not in SingletonMeta._instances:
                SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
            return SingletonMeta._instances[cls]

    def clear(cls) -> None:
        """Forget the instance of this class."""
        with SingletonMeta._lock:
            SingletonMeta._instances.pop(cls, None)
