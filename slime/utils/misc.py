"""Documented import path of small helpers for plugins."""

from __future__ import annotations

import socket

from slime.config.hooks import load_function
from slime.plugins.compat.helpers import Box, SingletonMeta, exec_command

__all__ = [
    "Box", "SingletonMeta", "exec_command", "get_current_node_ip", "get_free_port", "load_function",
]  # fmt: skip

_LAST_PORT = 65535


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
