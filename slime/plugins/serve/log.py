"""The log of commands, which is written before a command is done, and their answers."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from slime.data.plain_values import write_atomically

Record = dict[str, Any]
"""A command: ``do``, its kind; ``id``, the same in each retry; ``tenant``; ``model`` and
``number``, its place among the commands of a model; and what its request says."""


@dataclass(frozen=True)
class Answer:
    """What a command has led to: an object, a message of the API as bytes, or an error.

    Attributes:
        blame: ``user`` or ``server``, of an error.
    """

    value: object = None
    data: bytes | None = None
    error: str | None = None
    blame: str = "user"

    def line(self, command: str) -> Record:
        """Return the record of the answer to a command."""
        known: Record = {"answer": command}
        if self.error is not None:
            return known | {"error": self.error, "blame": self.blame}
        if self.data is not None:
            return known | {"data": base64.b64encode(self.data).decode()}
        return known | {"value": self.value}

    @classmethod
    def of(cls, record: Record) -> Answer:
        """Return the answer in a record."""
        data = record.get("data")
        return cls(
            record.get("value"),
            None if data is None else base64.b64decode(data),
            record.get("error"),
            record.get("blame", "user"),
        )


def read(file: Path) -> list[Record]:
    """Return the records of a log. A last line that is cut off is none: the process was killed
    while it wrote it, so nobody was told of it.
    """
    lines = file.read_bytes().splitlines(keepends=True)
    return [orjson.loads(line) for line in lines if line.endswith(b"\n")]


def compact(file: Path, reached: Callable[[str], int]) -> int:
    """Leave in a log what a server needs to go on, and no longer what a replay would need: commands
    of models before their saved state, samples that were drawn, and the answers to both.

    Args:
        reached: The number of the last command in the saved state of a model; 0 without one.

    Returns:
        The bytes that are gone.
    """
    records = read(file)
    answered = {one["answer"] for one in records if "answer" in one}
    ended = {one["model"] for one in records if one.get("do") == "unload_model"}

    def needed(one: Record) -> bool:
        if one["id"] not in answered or "sampler" in one:
            return True
        if "model" not in one:
            return bool(one["do"] != "sample")
        # what made a model and what ended it keep its name and its place in lists
        if one["number"] == 0 or one["do"] == "unload_model":
            return True
        return one["model"] not in ended and one["number"] >= reached(one["model"])

    kept = {one["id"] for one in records if "do" in one and needed(one)}
    before = file.stat().st_size
    write_atomically(
        file,
        lambda new: new.writelines(
            orjson.dumps(one) + b"\n" for one in records if one.get("id", one.get("answer")) in kept
        ),
    )
    file.chmod(0o600)
    return before - file.stat().st_size


class Log:
    """Lines of JSON in one file, each of which is on disk when :meth:`append` returns.

    Attributes:
        before: The records of earlier processes.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(0o600)
        self.before = read(file)
        self._file = file.open("r+b")
        # what a killed process has left of a line is written over
        self._file.seek(sum(len(line) for line in self._file if line.endswith(b"\n")))
        self._file.truncate()

    def append(self, record: Record) -> None:
        self._file.write(orjson.dumps(record) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
