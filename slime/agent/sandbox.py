"""A Python tool for models: each snippet runs in a process of its own that the kernel shuts in.

========================  =====================================  =======================================
against                   isolation "full" (the default)         isolation "process"
========================  =====================================  =======================================
time                      wall-clock deadline, then SIGKILL      the same
memory                    address-space limit per process        the same
processes                 none may be started, or at most        none may be started
                          ``tasks`` with ``children=True``
output                    killed at ``output_bytes``             the same
files, reading            an empty root with Python's own        **whatever this user may read**
                          files and ``readable``, read-only      (as root: what a nobody may read)
files, writing            ``/sandbox`` and ``/tmp`` in memory,   no file can be opened for writing
                          ``disk_bytes`` together
network                   no interface, no sockets               no sockets
other processes           cannot be seen (own process numbers)   no signals, no ptrace; **memory and environment
                                                                 of this user's processes can be read** through
                                                                 ``/proc`` (as root: of nobody's)
other programs            only with ``children=True``            cannot be started
environment variables     none are passed on                     the same
survivors                 the process namespace ends with the    one process, killed with its group
                          code: setsid, double forks too
========================  =====================================  =======================================

"full" needs Linux 5.12 with namespaces: as root with CAP_SYS_ADMIN, or as a user (root too) whom the kernel lets make
user namespaces. The memory limit holds for each process: with ``children=True`` all together may use ``tasks`` times as
much. A sandbox tries its isolation out when it is made and raises :class:`SandboxUnavailable` with the kernel's
reason where it does not hold; it never falls back by itself. Both need seccomp, on x86_64 or aarch64.

It is one process per snippet and not the standing workers of :mod:`slime.rollout.verifier`: those run code that is
trusted not to leave traces in its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Isolation = Literal["full", "process"]
_CHILD = Path(__file__).with_name("sandbox_child.py")
_START_SECONDS = 60.0  # until the code begins, on a busy machine; not in the code's limit


class SandboxUnavailable(RuntimeError):
    """This machine does not give the isolation that was asked for, or a sandbox could not be set up."""


@dataclass(frozen=True)
class Limits:
    """What one snippet may use.

    Args:
        seconds: wall-clock time from when the code begins; CPU time is limited to about the same.
        memory_bytes: address space of each process, the interpreter's own (about 20 MB) in it.
        output_bytes: of standard output, and of standard error.
        disk_bytes: of all files together.
        open_files: file descriptors of each process.
        tasks: threads, and processes with ``children``.
        children: whether the code may start processes.
    """

    seconds: float = 5.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 64 << 10
    disk_bytes: int = 32 << 20
    open_files: int = 64
    tasks: int = 16
    children: bool = False


@dataclass(frozen=True)
class Result:
    """What became of a snippet.

    ``ok``: exit status 0. ``error``: another exit status, most often an exception; the traceback is in ``stderr``.
    ``timeout``, ``output``: killed at that limit. ``killed``: ended by a signal (CPU time, a crash).
    """

    status: Literal["ok", "error", "timeout", "output", "killed"]
    stdout: str
    stderr: str
    seconds: float
    exit_code: int

    @property
    def ok(self) -> bool:
        return self.status == "ok"


class Sandbox:
    """Runs snippets, at most ``workers`` at a time.

    ::

        sandbox = Sandbox()
        result = await sandbox.run("print(2 ** 100)")

    Args:
        limits: of every snippet.
        workers: snippets that run at once (of one event loop); default: one per CPU.
        isolation: see the module.
        readable: folders that the code can read and import from; root's sandboxes read what anybody may.
        python: the interpreter; default: this one, of which the code sees the standard library alone.

    Raises:
        SandboxUnavailable: the isolation does not hold on this machine.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        workers: int | None = None,
        isolation: Isolation = "full",
        readable: Sequence[str | Path] = (),
        python: str = sys.executable,
    ) -> None:
        self.limits, self.isolation = limits or Limits(), isolation
        self.python = python
        self.readable = tuple(str(Path(path).resolve()) for path in readable)
        if self.limits.children and isolation != "full":
            raise ValueError('Limits(children=True) needs isolation "full": nothing else finds all processes again')
        self._workers = workers or os.cpu_count() or 1
        self._rooms: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        _try_out(isolation, self.readable, python)

    async def run(self, code: str, seconds: float | None = None) -> Result:
        """Run ``code`` as ``__main__`` and wait for its end.

        Args:
            seconds: instead of the limit's.

        Raises:
            SandboxUnavailable: the process could not be shut in; the code has not run.
        """
        limits = self.limits if seconds is None else Limits(**{**asdict(self.limits), "seconds": seconds})
        room = self._rooms.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._workers))
        async with room:
            return await _run(_order(code, limits, self.isolation, self.readable), limits, self.python)


def _order(code: str, limits: Limits, isolation: Isolation, readable: Sequence[str]) -> bytes:
    return json.dumps({"code": code, "isolation": isolation, "readable": readable, **asdict(limits)}).encode()


def _command(python: str, ready: int) -> list[str]:
    """The launcher, isolated from everything installed; it writes to the file descriptor ``ready``."""
    return [python, "-I", "-S", "-B", str(_CHILD), str(ready)]


def _environment() -> dict[str, str]:
    """Nothing of the run's own environment: no keys, no tokens."""
    return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", "HOME": "/sandbox"}


@functools.lru_cache
def _try_out(isolation: Isolation, readable: tuple[str, ...], python: str) -> None:
    """Set up one sandbox; the reason when that fails."""
    if not sys.platform.startswith("linux"):
        raise SandboxUnavailable(f"sandboxes need Linux's namespaces and seccomp; this is {sys.platform}")
    ready, theirs = os.pipe()
    done = subprocess.run(
        _command(python, theirs),
        pass_fds=[theirs],
        input=_order("import decimal, random\nprint('in')", Limits(), isolation, readable),
        env=_environment(),
        capture_output=True,
        timeout=_START_SECONDS,
        cwd="/",
        start_new_session=True,
    )
    os.close(ready)
    os.close(theirs)
    if done.returncode or done.stdout.strip() != b"in":
        raise SandboxUnavailable(_reason(isolation, done.stderr.decode(errors="replace"), python))


def _reason(isolation: str, stderr: str, python: str) -> str:
    if isolation == "process" and "ModuleNotFoundError" in stderr and os.geteuid() == 0:
        return (
            'isolation "process" does not hold on this machine: root\'s sandboxes run as a nobody, who may not read '
            f"the standard library of {python} ({stderr.strip().splitlines()[-1]}). Give Sandbox(python=…) an "
            "interpreter that anybody may read, such as /usr/bin/python3"
        )
    last = stderr.strip().splitlines()[-1:] or ["it ended without a word"]
    advice = (
        "; allow user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0, "
        'or the container\'s seccomp profile and CAP_SYS_ADMIN), or ask for isolation="process" and read in '
        "slime/agent/sandbox.py what that leaves open"
    )
    return f'isolation "{isolation}" does not hold on this machine: {last[0]}{advice if isolation == "full" else ""}'


async def _run(order: bytes, limits: Limits, python: str) -> Result:
    async with _process(python) as (process, ready):
        assert process.stdin and process.stdout and process.stderr
        over = asyncio.Event()
        streams = (process.stdout, process.stderr)
        outputs = [asyncio.create_task(_read(stream, limits.output_bytes, over)) for stream in streams]
        try:
            process.stdin.write(order)
            process.stdin.close()
            async with asyncio.timeout(_START_SECONDS):  # Python 3.11's wait_for may swallow a cancellation
                began = await ready.read(1)
                said = b"" if began else await outputs[1]
            if not began:
                lines = said.decode(errors="replace").splitlines()
                raise SandboxUnavailable(f"a sandbox could not be set up: {(lines or ['it ended without a word'])[-1]}")
            start = time.monotonic()
            stopped = await _until_end(process, over, limits.seconds)
            seconds = time.monotonic() - start
        finally:
            _kill(process)  # closes the streams, so that their readers end, without which asyncio's wait would not
            stdout, stderr = [part.decode(errors="replace") for part in await asyncio.gather(*outputs)]
        code = await process.wait()
    ended: Literal["ok", "killed", "error"] = "ok" if code == 0 else "killed" if code < 0 or code > 128 else "error"
    return Result(stopped or ended, stdout, stderr, seconds, code)


async def _until_end(
    process: asyncio.subprocess.Process, over: asyncio.Event, seconds: float
) -> Literal["timeout", "output"] | None:
    """Wait until the process ends, or for the limit that it reached."""
    waiting = [asyncio.create_task(process.wait()), asyncio.create_task(over.wait())]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return "output" if over.is_set() else None if waiting[0].done() else "timeout"
    finally:
        for task in waiting:
            task.cancel()


async def _read(stream: asyncio.StreamReader, most: int, over: asyncio.Event) -> bytes:
    """The first ``most`` bytes of all that comes; ``over`` is set when there are more."""
    kept = bytearray()
    while part := await stream.read(1 << 16):
        if len(kept) + len(part) > most:
            over.set()
        kept += part[: most - len(kept)]
    return bytes(kept)


@contextlib.asynccontextmanager
async def _process(python: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    """The launcher in a session of its own, and the stream that says when the code begins; killed at the end."""
    ours, theirs = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours, "rb", 0)
    )
    process = None
    try:
        try:
            process = await asyncio.create_subprocess_exec(
                *_command(python, theirs),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                env=_environment(), cwd="/", pass_fds=[theirs], start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(theirs)
        yield process, reader
    finally:
        transport.close()
        if process is not None:
            _kill(process)
            await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    """End the whole group; the namespaces of "full" end with it."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
