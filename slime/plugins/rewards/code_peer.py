"""The two ends of the pipes between a program and its tests. Each runs in a sandbox of its own,
with the standard library alone, so the text of this file is put before both. See
:func:`slime.plugins.rewards.code_tests.trials`.

Plain values are copied: a program that returns an object of a class of its own cannot decide how it
compares with them. All other objects stay where they are, and the other end gets a :class:`Remote`
for each. The tests may do everything with those of the program; the program may only call functions
of the tests.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import io
import operator
import os
import pickle
import struct
import sys
from typing import Any, NoReturn

_BASES: tuple[Any, ...] = (
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    tuple,
    list,
    set,
    frozenset,
    dict,
)
_OTHERS = (
    bool, range, slice, object, type(None), collections.deque, decimal.Decimal,
    datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone,
)  # fmt: skip
_PLAIN = {*_BASES, *_OTHERS}
_BY_NAME = {(kind.__module__, kind.__qualname__): kind for kind in _PLAIN}
_HEADER = struct.Struct(">Q")


class Peer:
    """One end of the pipes.

    Args:
        reader: File descriptor of the messages of the other end.
        writer: File descriptor of the messages to the other end.
        names: The namespace of the program, which its end serves; the tests' end has None.
    """

    def __init__(self, reader: int, writer: int, names: dict[str, Any] | None = None) -> None:
        self.reader = os.fdopen(reader, "rb")
        self.writer = os.fdopen(writer, "wb")
        self.judges = names is None
        self.kept: list[Any] = [names]
        self.handles: dict[int, int] = {}
        # one for each object, so that ``is`` means what it says
        self.remotes: dict[int, Remote] = {}
        self.errors: dict[str, type[Exception]] = {}

    def ask(self, handle: int, operation: str, *values: object, **named: object) -> Any:
        """Let the other end apply an operation to one of its objects; return the result or raise
        its exception.

        A list, dict or set among the values changes as that of the other end, if the operation
        returns None."""
        # While it waits, the other end may ask in turn.
        self._send(("ask", handle, operation, values, named))
        while True:
            kind, *content = self._receive()
            if kind == "ask":
                self._reply(*content)
            elif kind == "value":
                result, changed = content
                for value, new in zip(values, changed, strict=False):
                    _become(value, new)
                return result
            else:
                names, arguments = content
                raise self.error(names)(*arguments)

    def serve(self) -> None:
        """Do what the other end asks until it closes its pipe."""
        while True:
            self._reply(*self._receive()[1:])

    def _reply(
        self, handle: int, operation: str, values: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        try:
            # The program must not look into the tests.
            if self.judges and operation != "call":
                raise TypeError("a program can only call the functions that its tests give it")
            apply = operator.call if operation == "call" else getattr(operator, operation, None)
            result = (apply or getattr(builtins, operation))(self.kept[handle], *values, **named)
            self._send(("value", result, values if result is None else ()))
        except Exception as error:
            self._send(("error", [kind.__name__ for kind in type(error).__mro__], error.args))

    def error(self, names: list[str]) -> type[Exception]:
        """Return the exception of the first of these names that is built in; those before it become
        classes of it.
        """
        kind = getattr(builtins, str(names[0]), None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            return kind
        if names[0] not in self.errors:
            self.errors[names[0]] = type(
                str(names[0]), (self.error(names[1:]) if names[1:] else Exception,), {}
            )
        return self.errors[names[0]]

    def _send(self, message: object) -> None:
        data = io.BytesIO()
        _Writer(data, self).dump(message)
        try:
            self.writer.write(_HEADER.pack(data.tell()) + data.getvalue())
            self.writer.flush()
        except BrokenPipeError:
            self._end()

    def _receive(self) -> Any:
        header = self.reader.read(_HEADER.size)
        if len(header) < _HEADER.size:
            self._end()
        return _Reader(io.BytesIO(self.reader.read(*_HEADER.unpack(header))), self).load()

    def _end(self) -> NoReturn:
        """End this process: no test may take the end of the program for an exception that it
        expects.
        """
        if self.judges:
            print("AssertionError: the program has ended", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(int(self.judges))


class Remote:
    """An object of the other end.

    Two of them are compared as their class says. With a plain value, one is never equal, and its
    arithmetic gives no plain value: an object of a program could otherwise say that it is 3, or
    that its difference from 3 is 0.
    """

    def __init__(self, peer: Peer, handle: int) -> None:
        self.__dict__.update(_peer=peer, _handle=handle)

    def _ask(self, operation: str, *values: object, **named: object) -> Any:
        return self._peer.ask(self._handle, operation, *values, **named)

    def __call__(self, *values: object, **named: object) -> Any:
        return self._ask("call", *values, **named)

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", name)

    def __enter__(self) -> Any:
        return self._ask("getattr", "__enter__")()

    def __exit__(self, *error: object) -> None:  # a program may not swallow an AssertionError
        self._ask("getattr", "__exit__")(*error)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and bool(value._ask("isinstance", self))


def _forward(operation: str) -> Any:
    return lambda self, *values: self._ask(operation, *values)


def _between_two(operation: str) -> Any:
    return lambda self, other: (
        self._ask(operation, other) if type(other) is Remote else NotImplemented
    )


def _arithmetic(operation: str) -> Any:
    def apply(self: Remote, other: object) -> Any:
        result = self._ask(operation, other)
        return result if type(other) is Remote or type(result) is Remote else NotImplemented

    return apply


for _name in (
    "setattr",
    "len",
    "iter",
    "next",
    "getitem",
    "setitem",
    "delitem",
    "str",
    "repr",
    "bool",
    "hash",
    "neg",
):
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _between_two(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(Remote, f"__{_name}__", _arithmetic(_name))


def _become(value: object, new: object) -> None:
    """Give a list, deque, dict or set the content of another one."""
    for kind, add in (
        (list, "extend"),
        (collections.deque, "extend"),
        (dict, "update"),
        (set, "update"),
    ):
        if type(value) is type(new) is kind:
            operator.methodcaller("clear")(value)
            operator.methodcaller(add, new)(value)


class _Writer(pickle.Pickler):
    """Writes plain values. Instances of their subclasses become plain, and all else a number of
    this end.
    """

    def __init__(self, file: io.BytesIO, peer: Peer) -> None:
        super().__init__(file, 5)
        self.peer = peer

    def persistent_id(self, value: object) -> Any:
        if isinstance(value, type) and issubclass(value, Exception):
            return "error", [kind.__name__ for kind in value.__mro__]
        # What came from the other end goes back as itself.
        if type(value) is Remote:
            return "yours", value._handle
        if type(value) is fractions.Fraction:
            return "fraction", (value.numerator, value.denominator)
        # Plain values and classes are copied, all else gets a number.
        kind = value if isinstance(value, type) else type(value)
        if (kind in _PLAIN and type(value) is not object) or isinstance(value, _BASES):
            return None
        if id(value) not in self.peer.handles:
            self.peer.handles[id(value)] = len(self.peer.kept)
            self.peer.kept.append(value)
        return "mine", self.peer.handles[id(value)]

    def reducer_override(self, value: object) -> Any:
        for base in _BASES:
            if isinstance(value, base) and type(value) not in _PLAIN:
                return base, (str.__str__(value) if base is str else base(value),)
        return NotImplemented


class _Reader(pickle.Unpickler):
    """Reads plain values. What comes from a program is not trusted, so only classes that cannot be
    changed are found:
    the state of a pickled class could otherwise replace its ``__eq__``."""

    def __init__(self, file: io.BytesIO, peer: Peer) -> None:
        super().__init__(file)
        self.peer = peer

    def find_class(self, module: str, name: str) -> Any:
        return _BY_NAME[module, name]

    def persistent_load(self, number: tuple[str, Any]) -> Any:
        owner, content = number
        if owner == "error":
            return self.peer.error(content)
        if owner == "fraction":
            return fractions.Fraction(*content)
        if owner == "yours":
            return self.peer.kept[content]
        return self.peer.remotes.setdefault(content, Remote(self.peer, content))
