"""Servers in this process: clients reach them through a pair of sockets instead of a port.

An inline run has its engine in the process of its clients. The
engine speaks HTTP as everywhere else, so that nothing else differs, but it listens nowhere. Tensors
are handed over as they are.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Server:
    loop: asyncio.AbstractEventLoop
    protocol: Callable[[], asyncio.BaseProtocol]


_servers: dict[tuple[str, int], _Server] = {}
_tensors: dict[str, torch.Tensor] = {}


def serve(
    url: str, loop: asyncio.AbstractEventLoop, protocol: Callable[[], asyncio.BaseProtocol]
) -> None:
    """Let clients of this process reach the server at ``url`` without a port.

    Args:
        loop: The event loop on which the server runs.
        protocol: Makes the server's side of a connection.
    """
    _servers[_authority(url)] = _Server(loop, protocol)


def withdraw(url: str) -> None:
    """Take back :func:`serve`; nothing happens if there is no such server."""
    _servers.pop(_authority(url), None)


def is_local(url: str) -> bool:
    """Return whether the server at ``url`` is in this process."""
    return _authority(url) in _servers


def connection(host: str, port: int) -> socket.socket | None:
    """Return the client's end of a new connection; None if the server is not in this process."""
    server = _servers.get((host, port))
    if server is None:
        return None
    client, accepted = socket.socketpair()
    accepted.setblocking(False)

    def accept() -> None:
        server.loop.create_task(server.loop.connect_accepted_socket(server.protocol, accepted))

    try:
        server.loop.call_soon_threadsafe(accept)
    except RuntimeError as error:  # the loop has ended
        client.close()
        accepted.close()
        raise ConnectionRefusedError(f"the server at {host}:{port} has ended") from error
    return client


def offer(tensor: torch.Tensor) -> str:
    """Keep a tensor for :func:`take`, and return its name, which cannot be guessed."""
    name = secrets.token_hex(16)
    _tensors[name] = tensor
    return name


def take(name: str) -> torch.Tensor | None:
    """Return a tensor that was offered, once; None if there is none of this name."""
    return _tensors.pop(name, None)


def _authority(url: str) -> tuple[str, int]:
    address = urlsplit(url)
    return address.hostname or "", address.port or 80
