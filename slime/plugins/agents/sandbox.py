"""A Python tool for models. Each snippet runs in a separate process that the kernel isolates.

========================  =====================================  =======================================
resource                  isolation "full" (the default)         isolation "process"
========================  =====================================  =======================================
time                      wall-clock deadline, then SIGKILL      the same
memory                    address-space limit per process        the same
processes                 no new ones, or at most ``tasks``      no new ones
                          with ``children=True``
output                    killed at ``output_bytes``             the same
reading files             an empty root with Python's own        **all files that this user can read**
                          files and ``readable``, read-only      (for root: those that everybody can read)
writing files             ``/sandbox`` and ``/tmp`` in memory,   no file can be opened for writing
                          ``disk_bytes`` in total
network                   no interface, no sockets               no sockets
other processes           invisible (own process namespace)      no signals, no ptrace; **memory and environment
                                                                 of this user's processes can be read** through
                                                                 ``/proc`` (for root: of an unused user's)
other programs            only with ``children=True``            cannot be started
environment variables     none are passed on                     the same
processes left behind     none: the process namespace ends       none: one process, killed with its group
                          with the code, also after setsid
========================  =====================================  =======================================

"full" needs Linux 5.12 with namespaces: either root with CAP_SYS_ADMIN, or a user (also root) that
may create user namespaces. The memory limit applies to each process, so with ``children=True`` all
processes together can use ``tasks`` times as much. A sandbox tests its isolation when it is
created, and raises :class:`SandboxUnavailable` with the kernel's reason if it does not work; it
never falls back to less isolation. Both need seccomp on x86_64 or aarch64.

A sandbox starts one process per snippet. The reusable workers of :mod:`slime.rollout.verifier` are
not suitable for the code of a model, because they run code that is trusted not to affect later
calls in the same process.
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
# deadline for the start of the code on a busy machine; it does not count for the code's limit
START_SECONDS = 60.0


class SandboxUnavailable(RuntimeError):
    """Raised if this machine does not support the requested isolation, or if a sandbox could not be
    set up.
    """


@dataclass(frozen=True)
class Limits:
    """Limits of one snippet.

    Args:
        seconds: Wall-clock time from the start of the code. CPU time is limited to about the same.
        memory_bytes: Address space of each process, including about 20 MB for the interpreter.
        output_bytes: Size of the standard output, and separately of the standard error.
        disk_bytes: Total size of all files.
        open_files: File descriptors of each process.
        tasks: Number of threads, and of processes with ``children``.
        children: Whether the code may start processes.
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
    """The result of a snippet.

    ``status`` is one of: ``ok``, exit status 0. ``error``, another exit status, usually because of
    an exception, whose traceback is in ``stderr``. ``timeout`` or ``output``, killed at this limit.
    ``killed``, ended by a signal (CPU time limit or crash).
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
    """Runs snippets of Python code, at most ``workers`` at a time.

    ::

        sandbox = Sandbox()
        result = await sandbox.run("print(2 ** 100)")

    Args:
        limits: Limits of every snippet.
        workers: Number of snippets of one event loop that run at the same time. Default: one per
            CPU.
        isolation: "full" or "process", see the module.
        readable: Folders that the code can read and import from. If this process is root, the code
            can read only files in them that everybody can read.
        python: Path of the interpreter. Default: this one. The code can import only its standard
            library.
        writable: Absolute paths of further folders in memory, as ``/sandbox`` is one. Only with
            isolation "full".

    Raises:
        SandboxUnavailable: The isolation does not work on this machine.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        workers: int | None = None,
        isolation: Isolation = "full",
        readable: Sequence[str | Path] = (),
        python: str = sys.executable,
        writable: Sequence[str] = (),
    ) -> None:
        self.limits = limits or Limits()
        self.isolation = isolation
        self.python = python
        # A link such as /bin is shown beside what it leads to.
        paths = ((os.path.abspath(path), os.path.realpath(path)) for path in readable)
        self.readable = tuple(dict.fromkeys(path for pair in paths for path in pair))
        self.writable = tuple(writable)
        if self.limits.children and isolation != "full":
            raise ValueError(
                'Limits(children=True) needs isolation "full", which alone can find and end all '
                "processes"
            )
        self._workers = workers or os.cpu_count() or 1
        self._rooms: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        _try_out(isolation, self.readable, python, self.writable)

    async def run(
        self, code: str, seconds: float | None = None, passed: Sequence[int] = ()
    ) -> Result:
        """Run ``code`` as ``__main__`` and wait for its end.

        Args:
            seconds: Deadline that replaces ``limits.seconds``.
            passed: File descriptors that the code has too. They are closed here.

        Raises:
            SandboxUnavailable: The process could not be isolated, and the code was not run.
        """
        limits = (
            self.limits
            if seconds is None
            else Limits(**{**asdict(self.limits), "seconds": seconds})
        )
        with contextlib.ExitStack() as unused:
            for descriptor in passed:
                unused.callback(os.close, descriptor)
            async with self._room():
                unused.pop_all()  # from here on, _process closes them
                return await _run(self._order(code, limits), limits, self.python, passed)

    async def run_pair(self, code: str, other: str) -> tuple[Result, Result]:
        """Run two snippets at once, each in a sandbox of its own, with a pipe from each to the
        other.

        Both define a function ``converse(reader, writer)``. It is called at the end with the file
        descriptor of the pipe from the other snippet and that of the pipe to it.

        Raises:
            SandboxUnavailable: A process could not be isolated, and its snippet was not run.
        """
        async with self._room():
            reader, other_writer = os.pipe()
            other_reader, writer = os.pipe()
            return await asyncio.gather(
                self._converse(code, reader, writer),
                self._converse(other, other_reader, other_writer),
            )

    async def _converse(self, code: str, reader: int, writer: int) -> Result:
        code = f"{code}\nconverse({reader}, {writer})\n"
        return await _run(
            self._order(code, self.limits), self.limits, self.python, (reader, writer)
        )

    def _room(self) -> asyncio.Semaphore:
        return self._rooms.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._workers))

    def _order(self, code: str, limits: Limits) -> bytes:
        return _order(code, limits, self.isolation, self.readable, self.writable)


def _order(
    code: str,
    limits: Limits,
    isolation: Isolation,
    readable: Sequence[str],
    writable: Sequence[str] = (),
) -> bytes:
    paths = {"isolation": isolation, "readable": readable, "writable": writable}
    return json.dumps({"code": code, **paths, **asdict(limits)}).encode()


def program_command(file: str, arguments: Sequence[str], limits: Limits) -> list[str]:
    """Return the command of a Python program in a sandbox, with isolation "full", that keeps its
    standard input and output: for servers that speak over them.

    Of the machine's files, the program can read its folder and the installed packages. It is killed
    when the process that starts the command ends. ``seconds`` of the limits is both its longest
    life and its processor time; ``output_bytes`` is not used.

    Args:
        file: Path of the program.
        arguments: Its arguments.

    Raises:
        SandboxUnavailable: The isolation does not work on this machine.
    """
    path = Path(file).resolve()
    readable = tuple(dict.fromkeys([str(path.parent), *installed_packages()]))
    _try_out("full", readable, sys.executable)
    code = (
        "import runpy, sys\n"
        f"sys.argv = {[str(path), *arguments]!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    return [*_launcher(sys.executable), _order(code, limits, "full", readable).decode()]


def installed_packages() -> list[str]:
    """Return the folders of the packages that this Python can import."""
    return [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]


def _launcher(python: str) -> list[str]:
    """Return the command of the launcher without its argument. It imports only the standard
    library.
    """
    return [python, "-I", "-S", "-B", str(_CHILD)]


def _command(python: str, ready: int) -> list[str]:
    """Return the command of the launcher that writes to the file descriptor ``ready`` when the code
    starts.
    """
    return [*_launcher(python), str(ready)]


def _environment() -> dict[str, str]:
    """Return the environment of the code. It contains nothing of the run's environment, which may
    have API keys.
    """
    return {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
        "HOME": "/sandbox",
    }


@functools.lru_cache
def _try_out(
    isolation: Isolation, readable: tuple[str, ...], python: str, writable: tuple[str, ...] = ()
) -> None:
    """Set up a sandbox once, and raise :class:`SandboxUnavailable` with the reason if that
    fails.
    """
    if not sys.platform.startswith("linux"):
        raise SandboxUnavailable(
            f"sandboxes need namespaces and seccomp of Linux, but this is {sys.platform}"
        )
    ready, theirs = os.pipe()
    done = subprocess.run(
        _command(python, theirs),
        pass_fds=[theirs],
        input=_order(
            "import decimal, random\nprint('in')", Limits(), isolation, readable, writable
        ),
        env=_environment(),
        capture_output=True,
        timeout=START_SECONDS,
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
            'isolation "process" does not work on this machine: sandboxes of root run as an unused user, which cannot '
            f"read the standard library of {python} ({stderr.strip().splitlines()[-1]}). Pass Sandbox(python=…) an "
            "interpreter that everybody can read, such as /usr/bin/python3"
        )
    last = stderr.strip().splitlines()[-1:] or ["it ended without a message"]
    advice = (
        "; allow user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0, "
        'or the container\'s seccomp profile and CAP_SYS_ADMIN), or use isolation="process", whose weaknesses '
        "slime/plugins/agents/sandbox.py describes"
    )
    return (
        f'isolation "{isolation}" does not work on this machine: '
        f"{last[0]}{advice if isolation == 'full' else ''}"
    )


async def _run(order: bytes, limits: Limits, python: str, passed: Sequence[int] = ()) -> Result:
    async with _process(python, passed) as (process, ready):
        assert process.stdin and process.stdout and process.stderr
        over = asyncio.Event()
        streams = (process.stdout, process.stderr)
        outputs = [
            asyncio.create_task(_read(stream, limits.output_bytes, over)) for stream in streams
        ]
        try:
            process.stdin.write(order)
            process.stdin.close()
            try:
                # Not wait_for: in Python 3.11 it can swallow a cancellation.
                async with asyncio.timeout(START_SECONDS):
                    began = await ready.read(1)
                    error_output = b"" if began else await outputs[1]
            except TimeoutError as error:
                raise SandboxUnavailable(
                    f"a sandbox was not set up within {START_SECONDS:g} s"
                ) from error
            if not began:
                lines = error_output.decode(errors="replace").splitlines()
                raise SandboxUnavailable(
                    f"a sandbox could not be set up: {(lines or ['it ended silently'])[-1]}"
                )
            start = time.monotonic()
            stopped = await _until_end(process, over, limits.seconds)
            seconds = time.monotonic() - start
        finally:
            # asyncio's wait() returns only after both streams are closed, and processes of the code
            # may keep them open. So all processes are killed first.
            _kill(process)
            stdout, stderr = [
                part.decode(errors="replace") for part in await asyncio.gather(*outputs)
            ]
        code = await process.wait()
    ended: Literal["ok", "killed", "error"] = (
        "ok" if code == 0 else "killed" if code < 0 or code > 128 else "error"
    )
    return Result(stopped or ended, stdout, stderr, seconds, code)


async def _until_end(
    process: asyncio.subprocess.Process, over: asyncio.Event, seconds: float
) -> Literal["timeout", "output"] | None:
    """Wait until the process ends or reaches a limit; return the limit, or None if it ended by
    itself.
    """
    waiting = [asyncio.create_task(process.wait()), asyncio.create_task(over.wait())]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return "output" if over.is_set() else None if waiting[0].done() else "timeout"
    finally:
        for task in waiting:
            task.cancel()


async def _read(stream: asyncio.StreamReader, most: int, over: asyncio.Event) -> bytes:
    """Read the stream to its end, return the first ``most`` bytes, and set ``over`` if there are
    more.
    """
    kept = bytearray()
    while part := await stream.read(1 << 16):
        if len(kept) + len(part) > most:
            over.set()
        kept += part[: most - len(kept)]
    return bytes(kept)


@contextlib.asynccontextmanager
async def _process(
    python: str, passed: Sequence[int]
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    """Start the launcher in a new session; yield it with the stream that reports the start of the
    code. The process is killed at the end of the block. ``passed`` are file descriptors for the
    launcher, which are closed here."""
    # The pipe on which the launcher reports that the code starts.
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
                env=_environment(), cwd="/", pass_fds=[theirs, *passed], start_new_session=True,
            )  # fmt: skip
        finally:
            # The child has its own copies, and ours would keep the pipes open after its end.
            for descriptor in (theirs, *passed):
                os.close(descriptor)
        yield process, reader
    finally:
        # A process that is left over is killed with all that it has started.
        transport.close()
        if process is not None:
            _kill(process)
            await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the process group. With isolation "full", the namespaces and all processes in them end
    with it.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
