"""Sandboxes in which several commands work on the same files: one interface, for the sandbox of
this machine and for those of others.

:class:`LocalBox` is the namespace sandbox (:mod:`slime.plugins.agents.sandbox`), and
:class:`slime.plugins.agents.box_server.HttpBox` the same on another machine. A provider of sandboxes
is one more class that derives from :class:`Box`.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .sandbox import Limits, Result, Sandbox, installed_packages

LIMITS = Limits(
    seconds=60.0,
    memory_bytes=2 << 30,
    disk_bytes=256 << 20,
    open_files=256,
    tasks=64,
    children=True,
)
"""Limits of a box that is not given others."""
_PACKING_SECONDS = 20.0  # for the files of a box before and after a command
_CHILD = Path(__file__).with_name("box_child.py")


class BoxProblem(RuntimeError):
    """A box could not run a command, for a reason that lies outside of the command."""


@dataclass(frozen=True)
class Ran:
    """What a command did.

    Attributes:
        result: Its end and its output, of which each stream is cut at ``Limits.output_bytes``.
        files: The files that were asked for; None for one that is not there.
    """

    result: Result
    files: Mapping[str, bytes | None] = field(default_factory=dict)


class Box(ABC):
    """A sandbox that keeps its files from one command to the next.

    No process of a command may outlive it: one that stays could write the reward of a task.

    Args:
        limits: Limits of each command; ``seconds`` is the longest that one may ask for.
        folders: Absolute paths that commands may write to, and whose files are kept; commands begin
            in the first.
        scratch: Further ones, whose files need not be kept.
    """

    def __init__(self, limits: Limits, folders: Sequence[str], scratch: Sequence[str] = ()) -> None:
        self.limits = limits
        self.folders = tuple(folders)
        self.scratch = tuple(scratch)

    @abstractmethod
    async def run(
        self,
        command: str,
        seconds: float,
        put: Mapping[str, bytes] | None = None,
        get: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Ran:
        """Write files, run a command of the shell, and read files.

        Args:
            command: For ``bash -c``.
            seconds: Its deadline. A command that takes longer is killed, with the status
                ``timeout``.
            put: Contents by absolute path; the files are executable.
            get: Absolute paths.
            environment: Variables of the command.

        Raises:
            BoxProblem: The command was not run, or its result was lost.
        """

    async def close(self) -> None:
        """Give the box back. It is called once, also after an error."""
        return None


@functools.lru_cache
def _sandbox(limits: Limits, folders: tuple[str, ...]) -> Sandbox:
    """The sandbox of all boxes with these limits, so that they share its workers. Commands can read
    the programs of this machine and the installed packages.
    """
    programs = ("/usr", "/bin", "/sbin", "/etc/alternatives", f"{sys.base_prefix}/bin")
    readable = [path for path in (*programs, *installed_packages()) if os.path.exists(path)]
    return Sandbox(limits, readable=readable, writable=folders)


class LocalBox(Box):
    """The namespace sandbox of this machine. Between two commands the box is only the files of its
    ``folders``; each command has a sandbox of its own, so nothing that it starts or writes elsewhere
    is there for the next.
    """

    def __init__(self, limits: Limits, folders: Sequence[str], scratch: Sequence[str] = ()) -> None:
        super().__init__(limits, folders, scratch)
        wrapped = replace(limits, children=True, seconds=limits.seconds + _PACKING_SECONDS)
        self._sandbox = _sandbox(wrapped, (*self.folders, *self.scratch))
        self._files = b""

    async def run(
        self,
        command: str,
        seconds: float,
        put: Mapping[str, bytes] | None = None,
        get: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Ran:
        seconds = min(seconds, self.limits.seconds)
        order = {
            "command": command,
            "seconds": seconds,
            "folder": self.folders[0],
            "kept": self.folders,
            "put": {path: base64.b64encode(data).decode() for path, data in (put or {}).items()},
            "get": list(get),
            "output_bytes": self.limits.output_bytes,
            "environment": {**_paths(), **(environment or {})},
        }
        # Files in memory, of which the sandbox gets copies of the descriptors.
        source = os.memfd_create("before")
        target = os.memfd_create("after")
        with os.fdopen(source, "wb") as before, os.fdopen(target, "rb") as after:
            before.write(json.dumps(order).encode() + b"\n" + self._files)
            before.seek(0)
            passed = (os.dup(source), os.dup(target))
            code = f"{_CHILD.read_text(encoding='utf-8')}\nmain({passed[0]}, {passed[1]})\n"
            result = await self._sandbox.run(code, seconds + _PACKING_SECONDS, passed)
            after.seek(0)
            line = after.readline()
            files = after.read()
        # The command killed what watches over it, or its files do not fit: they are as before.
        if result.status != "ok":
            return Ran(result)
        self._files = files
        told = json.loads(line)
        got: dict[str, str | None] = told.pop("files")
        return Ran(
            Result(seconds=result.seconds, **told),
            {path: None if text is None else base64.b64decode(text) for path, text in got.items()},
        )


def _paths() -> dict[str, str]:
    """Variables with which the Python of this run, and its packages, are the ones that are found."""
    return {
        "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": ":".join(installed_packages()),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
