"""Length-prefixed JSON messages over a socket, with a deadline for each call. Used by the pool and
the worker.

The format is JSON and not pickle because a worker runs a symbolic parser on text that a model
wrote. The parent must not execute anything that such a process sends back.
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
    """The process at the other end has closed the socket or has ended."""


class Request(TypedDict, total=False):
    """A request of the pool to a worker: call ``function`` with ``args``, or only import it
    (``load_only``).
    """

    function: Required[str]
    args: Sequence[object]
    load_only: bool


def send(sock: socket.socket, message: object, deadline: float | None) -> None:
    """Send one message.

    Args:
        message: A JSON value.
        deadline: A ``time.monotonic()`` value, or None to wait without a limit.

    Raises:
        TimeoutError: The message was not sent by the deadline.
        ChannelClosed: The other end has closed the socket.
    """
    data = json.dumps(message).encode()
    sock.settimeout(_left(deadline))
    try:
        sock.sendall(_HEADER.pack(len(data)) + data)
    except TimeoutError:
        raise
    except OSError as error:
        raise ChannelClosed(str(error)) from error


def receive(sock: socket.socket, deadline: float | None) -> Any:
    """Receive one message. The arguments and errors are those of :func:`send`."""
    (length,) = _HEADER.unpack(_read(sock, _HEADER.size, deadline))
    return json.loads(_read(sock, length, deadline))


def _read(sock: socket.socket, size: int, deadline: float | None) -> bytes:
    parts = bytearray()
    # each recv gets the time that is left, since a worker could send one byte at a time
    while len(parts) < size:
        sock.settimeout(_left(deadline))
        try:
            part = sock.recv(min(size - len(parts), 1 << 20))
        except TimeoutError:  # it is an OSError too, but the channel is not closed
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
