"""``python supervisor.py -- SCRIPT FLAGS…``: run a driver, and run it again from its last snapshot when it is lost.

A run with ``--max-restarts`` has this small process as the parent of its driver. What ends a run from outside may end
the driver, too: Ray's C++ code exits the process when the head of the cluster is gone, and the kernel may kill it. So
the driver only says over a pipe how far it is (:class:`Reports`), and the decision is made here. All processes of the
run on this machine are descendants of this process, also those whose parents died, and none of them outlives a driver.

It imports nothing but the standard library and psutil: it lives as long as the run, and must not take part in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypedDict

from slime.config.parent import adopt_orphans, kill_with_parent

PIPE_VARIABLE = "SLIME_SUPERVISOR_PIPE"
SETTINGS_VARIABLE = "SLIME_SUPERVISOR_SETTINGS"
LOST_CODE = 75  # EX_TEMPFAIL; a driver that asks to be run again ends with it
LEFT_SECONDS = 2.0  # that processes of a driver which ended have to end by themselves
KILLED_SECONDS = 30.0  # that they have to end after a SIGKILL; the kernel may hold one for good
FORWARDED = {signal.SIGINT: signal.SIGRTMIN + 1, signal.SIGTERM: signal.SIGRTMIN + 2}
"""What a driver gets for a signal that came here. A signal to the whole process group, as of Ctrl-C, reaches the
driver by itself as well, and must not count twice."""
_POLL_SECONDS = 0.5
_OF_THE_FIRST_START = ("ckpt_step", "start_rollout_id", "finetune")


class Settings(TypedDict):
    """The arguments that decide whether and how a lost run goes on."""

    max_restarts: int
    save: str | None
    run_name: str | None
    output_dir: str | None


class Reports:
    """The driver's end of the pipe. Every method is a no-op in a process without a supervisor."""

    def __init__(self) -> None:
        self._pipe: int | None = None
        self.settings: dict[str, object] = {}
        """Of a driver that is run again: see :func:`restart_settings`."""

    def attach(self) -> bool:
        """Take the pipe over from the environment, which child processes inherit; whether there is one."""
        given = os.environ.pop(PIPE_VARIABLE, None)
        self.settings |= json.loads(os.environ.pop(SETTINGS_VARIABLE, "{}"))
        if given is not None:
            self._pipe = int(given)
            os.set_inheritable(self._pipe, False)
        return self._pipe is not None

    @property
    def attached(self) -> bool:
        return self._pipe is not None

    def began(self, values: Settings) -> None:
        """From here on an end without :meth:`over` is a loss. ``values``: see :func:`restart_settings`."""
        self._send({"began": values})

    def saved(self) -> None:
        """A snapshot of this run was committed."""
        self._send({"saved": True})

    def lost(self) -> None:
        """A part of the run was lost: whatever happens now, the driver is to be run again."""
        self._send({"lost": True})

    def over(self) -> None:
        """The run ends, well or not, and is not run again."""
        self._send({"over": True})

    def _send(self, message: dict[str, object]) -> None:
        if self._pipe is not None:
            with contextlib.suppress(OSError):  # the supervisor was killed, and this process is about to be
                os.write(self._pipe, json.dumps(message).encode() + b"\n")


REPORTS = Reports()


def supervise() -> None:
    """Replace this process by the supervisor of the command line that it was started with."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-P", os.path.abspath(__file__), "--", *sys.orig_argv[1:]])


def restart_settings(values: Settings, saved: bool) -> dict[str, object]:
    """Arguments with which a run goes on. They take precedence over the command line and over the files that it names
    (``--override``, ``--custom-config-path``); None stands for the default.

    Args:
        values: as the lost driver had them.
        saved: ``--save`` holds a snapshot of this run: go on from it. Otherwise from where the run began.
    """
    settings: dict[str, object] = {name: str(values[name]) for name in ("run_name", "output_dir")}
    settings["max_restarts"] = values["max_restarts"] - 1
    if saved:
        settings |= {"load": str(values["save"]), **dict.fromkeys(_OF_THE_FIRST_START)}
    return settings


@dataclass
class Driver:
    """One driver process, and what it has said so far."""

    child: subprocess.Popen[bytes]
    pipe: int
    said: dict[str, Any] = field(default_factory=dict)
    _rest: bytes = b""

    def listen(self, seconds: float) -> None:
        """Take in what it says within ``seconds``, or less where it says something."""
        if not select.select([self.pipe], [], [], seconds)[0]:
            return
        data = os.read(self.pipe, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.said.update(json.loads(line))
        if not data:  # it closed the pipe and is about to end
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(seconds)

    def ended_in_order(self) -> bool:
        """Whether it said that the run is over. Then it has ended the run's processes itself, and others that user code
        left on purpose are none of ours."""
        return "over" in self.said and "lost" not in self.said

    def next_settings(self) -> dict[str, object] | None:
        """Once it has ended: the settings that go on with the run; None where there is nothing to go on with."""
        values = self.said.get("began")
        if values is None or values["max_restarts"] < 1 or self.ended_in_order():
            return None
        return restart_settings(values, bool(self.said.get("saved")))


class Supervisor:
    """Runs one driver after the other."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.settings: dict[str, object] = {}
        self.stopped_by: int | None = None
        self.driver: Driver | None = None

    def run(self) -> int:
        """Until a driver ends for good; returns its exit status."""
        adopt_orphans()
        for number in FORWARDED:
            signal.signal(number, self._on_signal)
        while True:
            driver = self._start()
            if self.stopped_by is not None:  # the signal came when there was no driver to pass it on to
                driver.child.send_signal(FORWARDED[signal.Signals(self.stopped_by)])
            while driver.child.poll() is None:
                driver.listen(_POLL_SECONDS)
                _reap_others(driver.child.pid)
            driver.listen(0.0)
            os.close(driver.pipe)
            code = driver.child.returncode
            if not driver.ended_in_order():
                end_descendants(LEFT_SECONDS)
            following = driver.next_settings()
            if self.stopped_by is not None or following is None:
                return self._status(code)
            if "lost" not in driver.said:  # it could not say so itself
                left = driver.said["began"]["max_restarts"] - 1
                where = "its last snapshot" if driver.said.get("saved") else "where it began"
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                print(
                    f"lost the driver ({how}): going on from {where} ({left} more restarts, --max-restarts)",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            self.settings |= following

    def _start(self) -> Driver:
        ours, theirs = os.pipe()
        child = subprocess.Popen(
            [sys.executable, *self.words],
            env={**os.environ, PIPE_VARIABLE: str(theirs), SETTINGS_VARIABLE: json.dumps(self.settings)},
            pass_fds=[theirs],
            preexec_fn=kill_with_parent,  # safe: this process has one thread
        )
        os.close(theirs)
        self.driver = Driver(child, ours)
        return self.driver

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stopped_by = number
        if self.driver is not None and self.driver.child.poll() is None:
            self.driver.child.send_signal(FORWARDED[signal.Signals(number)])

    def _status(self, code: int) -> int:
        if code >= 0:
            return code
        if self.stopped_by is not None and -code in FORWARDED.values():  # before it could end in order
            return 128 + self.stopped_by
        return 128 - code


def end_descendants(seconds: float) -> None:
    """Wait until the processes below this one have ended, and kill those that have not after ``seconds``.

    One that does not end for :data:`KILLED_SECONDS` after that (the kernel holds it, or it is another user's) is left
    behind, and stderr says so.
    """
    import psutil

    until = time.monotonic() + seconds
    while True:
        _reap_others(0)
        left = psutil.Process().children(recursive=True)
        if not left:
            return
        if time.monotonic() > until + KILLED_SECONDS:
            pids = ", ".join(str(process.pid) for process in left)
            print(f"processes {pids} cannot be killed; they may keep memory or ports", file=sys.stderr, flush=True)
            return
        if time.monotonic() > until:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    process.kill()
        time.sleep(0.05)


def _reap_others(driver: int) -> None:
    """Bury processes that were given to this one when their parents ended; the driver itself is waited for by its
    owner."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and found.si_pid != driver:
            os.waitpid(found.si_pid, os.WNOHANG)


if __name__ == "__main__":
    sys.exit(Supervisor(sys.argv[2:]).run())
