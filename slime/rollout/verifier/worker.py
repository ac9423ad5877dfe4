"""A verifier process, which runs one call at a time: ``python -m slime.rollout.verifier.worker FD
MEMORY PARENT``; and the messages that it and the pool send each other: length-prefixed JSON over a
socket, with a deadline for each call.

The process does not import torch. The kernel kills it when its parent ends (parent-death signal),
and the pool kills it when it is stuck, so nothing here needs a time limit.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from slime.config.hooks import load_function
from slime.config.process import kill_with_parent

_HEADER = struct.Struct(">I")


class ChannelClosed(ConnectionError):
    """The process at the other end has closed the socket or has ended."""


class Request(TypedDict):
    """A request of the pool to a worker: call ``function`` with ``args``, or without, only import
    it.
    """

    function: str
    args: Sequence[object] | None


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


def _die_with(parent_pid: int) -> None:
    kill_with_parent()
    if os.getppid() != parent_pid:  # the parent ended before the call above, so no signal will come
        os._exit(1)


def _answer(request: Request, functions: dict[str, Callable[..., object]]) -> dict[str, object]:
    path = request["function"]
    try:
        if path not in functions:
            functions[path] = load_function(path)
        args = request["args"]
        return {"status": "ok", "value": None if args is None else functions[path](*args)}
    # a verifier may also raise SystemExit or KeyboardInterrupt; report every error
    except BaseException as error:
        return {
            "status": "error",
            "detail": f"{type(error).__name__}: {error}{_place(error)}"[:2000],
        }


def _place(error: BaseException) -> str:
    """Return the file and line that raised the error; empty if it was raised in this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code.co_filename == __file__:
        return ""
    return f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"


def main(argv: list[str]) -> None:
    """Serve requests until the parent closes the socket."""
    # The limits are set before any verifier is imported.
    fd, memory_bytes, parent_pid = (int(value) for value in argv)
    _die_with(parent_pid)
    if memory_bytes > 0:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Ctrl-C is handled by the run; the pool kills its workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.set_int_max_str_digits(20_000)
    # "cannot parse" is a normal outcome
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    functions: dict[str, Callable[..., object]] = {}
    with socket.socket(fileno=fd) as sock:
        try:
            while True:
                reply = _answer(receive(sock, None), functions)
                try:
                    send(sock, reply, None)
                except TypeError as error:  # the result is not a JSON value
                    send(
                        sock,
                        {
                            "status": "error",
                            "detail": f"the result of the verifier is not JSON: {error}",
                        },
                        None,
                    )
        except ChannelClosed:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
