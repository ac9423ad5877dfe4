"""Length-prefixed JSON over a socket, every call with a deadline. Shared by pool and worker.

JSON and not pickle: a worker runs a symbolic parser over text that a model wrote, so nothing that it
sends back may become code in the parent.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, Required, TypedDict

_HEADER = struct.Struct(">I")


class ChannelClosed(ConnectionError):
    """The other end is gone."""


class Request(TypedDict, total=False):
    """What a pool asks of its worker: call ``function`` with ``args``, or with ``load_only`` just import it."""

    function: Required[str]
    args: Sequence[object]
    load_only: bool


def send(sock: socket.socket, message: object, deadline: float | None) -> None:
    """Send one message. ``deadline`` is a ``time.monotonic()`` value or None. Raises TimeoutError, ChannelClosed."""
    data = json.dumps(message).encode()
    sock.settimeout(_left(deadline))
    try:
        sock.sendall(_HEADER.pack(len(data)) + data)
    except TimeoutError:
        raise
    except OSError as error:
        raise ChannelClosed(str(error)) from error


def receive(sock: socket.socket, deadline: float | None) -> Any:
    """Receive one message. Raises TimeoutError, and ChannelClosed at the end of the stream."""
    (length,) = _HEADER.unpack(_read(sock, _HEADER.size, deadline))
    return json.loads(_read(sock, length, deadline))


def _read(sock: socket.socket, size: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        sock.settimeout(_left(deadline))
        try:
            part = sock.recv(min(size - len(parts), 1 << 20))
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not part:
            raise ChannelClosed("end of stream")
        parts += part
    return bytes(parts)


def _left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
