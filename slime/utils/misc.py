"""Documented import path of small helpers for plugins."""

from __future__ import annotations

import socket
import subprocess
import threading
from typing import Any, Generic, TypeVar

from slime.config.hooks import load_function

__all__ = [
    "Box", "SingletonMeta", "exec_command", "get_current_node_ip", "get_free_port", "load_function",
]  # fmt: skip

T = TypeVar("T")
_LAST_PORT = 65535


class Box(Generic[T]):
    """Holds one object. Ray passes a box as an argument as it is, where it would resolve a bare
    object reference.
    """

    def __init__(self, inner: T) -> None:
        self._inner = inner

    @property
    def inner(self) -> T:
        return self._inner


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Run a command of bash, and return its output if ``capture_output`` is set.

    Raises:
        subprocess.CalledProcessError: The command failed.
    """
    done = subprocess.run(
        ["bash", "-c", cmd],
        check=True,
        text=True,
        stdout=subprocess.PIPE if capture_output else None,
    )
    return done.stdout if capture_output else None


def get_current_node_ip() -> str:
    """Return the address of this machine that Ray uses, or without Ray the one of its route to
    other machines.
    """
    import ray

    return str(ray.util.get_node_ip_address()).strip("[]")


def get_free_port(start_port: int = 10000, consecutive: int = 1) -> int:
    """Return the first port from ``start_port`` on where ``consecutive`` ports are free now.

    Another process may take them before they are used, so a caller should be prepared for that.

    Raises:
        OSError: There are none.
    """
    for first in range(start_port, _LAST_PORT + 2 - consecutive):
        if all(_is_free(first + offset) for offset in range(consecutive)):
            return first
    raise OSError(f"no {consecutive} free ports from {start_port} on")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError:
            return False
    return True


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
