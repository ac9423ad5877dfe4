"""The wire format of protocol buffers, as far as the API's messages need it.

Source: https://protobuf.dev/programming-guides/encoding/. A message is read as the values of its
fields by number; who knows the message says what they mean.
"""

from __future__ import annotations

import struct

Value = int | bytes
"""A number, or the bytes of a string, a message, or a number of fixed size."""


class Malformed(ValueError):
    """Bytes that are no message."""


def parse(data: bytes) -> dict[int, list[Value]]:
    """Return the values of each field, in their order.

    Raises:
        Malformed: The bytes are no message.
    """
    found: dict[int, list[Value]] = {}
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, kind = key >> 3, key & 7
        value: Value
        if kind == 0:
            value, position = _varint(data, position)
        elif kind in (1, 2, 5):
            size = {1: 8, 5: 4}.get(kind, 0)
            if kind == 2:
                size, position = _varint(data, position)
            value = data[position : position + size]
            position += size
            if position > len(data):
                raise Malformed("a field is longer than its message")
        else:
            raise Malformed(f"a field has the unknown wire type {kind}")
        if number == 0:
            raise Malformed("a field has the number 0")
        found.setdefault(number, []).append(value)
    return found


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise Malformed("a number ends too early")
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (2**64 - 1), position
    raise Malformed("a number has more than ten bytes")


def message(value: Value | None) -> dict[int, list[Value]]:
    """Return the fields of a message in a field; no value is an empty message."""
    return {} if value is None else parse(raw(value))


def raw(value: Value | None) -> bytes:
    """Return the bytes of a field; no value is empty."""
    if value is None:
        return b""
    if isinstance(value, int):
        raise Malformed("a field is a number, but should have bytes")
    return value


def text(value: Value | None) -> str:
    """Return the text of a field."""
    try:
        return raw(value).decode()
    except UnicodeDecodeError as error:
        raise Malformed("a text is not UTF-8") from error


def whole(value: Value | None) -> int:
    """Return the number of a field, which may be negative; no value is 0."""
    if value is None:
        return 0
    if isinstance(value, bytes):
        raise Malformed("a field has bytes, but should be a number")
    return value - 2**64 if value >= 2**63 else value


def double(value: Value | None) -> float:
    """Return the double of a field; no value is 0."""
    data = raw(value)
    if value is not None and len(data) != 8:
        raise Malformed("a double has eight bytes")
    return struct.unpack("<d", data)[0] if data else 0.0


def last(fields: dict[int, list[Value]], number: int) -> Value | None:
    """Return the value of a field that occurs once: as everywhere, the last one counts."""
    return fields[number][-1] if number in fields else None


def field(number: int, value: int | float | bytes | str) -> bytes:
    """Return a field: a varint, a double, or bytes."""
    if isinstance(value, float):
        return _encoded(number << 3 | 1) + struct.pack("<d", value)
    if isinstance(value, int):
        return _encoded(number << 3) + _encoded(value)
    data = value.encode() if isinstance(value, str) else value
    return _encoded(number << 3 | 2) + _encoded(len(data)) + data


def _encoded(value: int) -> bytes:
    value &= 2**64 - 1
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
