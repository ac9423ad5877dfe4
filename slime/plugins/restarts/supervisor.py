"""``python supervisor.py -- SCRIPT FLAGS…``: run a driver, and run it again from its last snapshot
if it is lost.

A run with ``--max-restarts`` has this small process as the parent of its driver. A fault that ends
a run may end the driver as well: Ray's C++ code exits the process when the head of the cluster is
gone, and the kernel may kill it. So the driver only reports over a pipe how far it is
(:class:`slime.cluster.stop_signals.Reports`), and the decision to restart is made here. All
processes of the run on this
machine are descendants of this process, even if their parents died, and all of them are ended
before the next driver starts.

This process lives as long as the run, and must not be affected by what happens in it. It imports
only the standard library, psutil, two small modules and, to clean up at the end, one more.
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
from typing import TYPE_CHECKING, Any, TypedDict

from slime.cluster.stop_signals import FORWARDED, PIPE_VARIABLE, SETTINGS_VARIABLE
from slime.config.process import adopt_orphans, kill_with_parent

if TYPE_CHECKING:
    import psutil

LEFT_SECONDS = 2.0  # for the remaining processes of a driver to end by themselves
# for them to end after SIGKILL; a process blocked in the kernel may never end
KILLED_SECONDS = 30.0
OF_RAY = ("raylet", "gcs_server", "ray::")
"""Beginnings of the names of a private cluster's processes. Ray itself waits for a frozen one
without an end, and the driver waits for an actor that freezes before its first answer until
``--start-timeout``."""
_POLL_SECONDS = 0.5
_AFTER_DRIVER = 2.0
"""Seconds after ``--status-timeout`` until a frozen process of the cluster is killed. The driver,
which asks actors for their status, says more about one that no longer answers, and comes first."""
# between two looks for the processes of the cluster, each of which reads all of /proc
_LOOK_SECONDS = 5.0
_OF_THE_FIRST_START = ("ckpt_step", "start_rollout_id", "finetune")


class Settings(TypedDict):
    """The arguments that decide whether and how a lost run continues."""

    max_restarts: int
    status_timeout: float
    save: str | None
    run_name: str | None
    output_dir: str | None


def supervise() -> None:
    """Replace this process by a supervisor, which runs the same command line as its child."""
    # exec drops what is still buffered. -P keeps this file's folder off the import path of the
    # supervisor.
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(
        sys.executable, [sys.executable, "-P", os.path.abspath(__file__), "--", *sys.orig_argv[1:]]
    )


def restart_settings(values: Settings, saved: bool) -> dict[str, object]:
    """Arguments with which a lost run continues.

    They take precedence over the command line and over the files that it names (``--override``,
    ``--custom-config-path``); None stands for the default.

    Args:
        values: The values of the lost driver.
        saved: Whether ``--save`` holds a snapshot of this run. If so, the run continues from it,
            otherwise from where it began.
    """
    settings: dict[str, object] = {name: str(values[name]) for name in ("run_name", "output_dir")}
    settings["max_restarts"] = values["max_restarts"] - 1
    # --ckpt-step, --start-rollout-id and --finetune chose where the first driver began. With the
    # run's own snapshot they would lead back there.
    if saved:
        settings |= {"load": str(values["save"]), **dict.fromkeys(_OF_THE_FIRST_START)}
    return settings


@dataclass
class Driver:
    """One driver process, and what it has reported so far."""

    child: subprocess.Popen[bytes]
    pipe: int
    said: dict[str, Any] = field(default_factory=dict)
    _rest: bytes = b""
    _looked: float = field(default_factory=time.monotonic)
    _searched: float = 0.0  # time.monotonic()
    _of_ray: list[tuple[str, psutil.Process]] = field(default_factory=list)
    _stopped: dict[int, float] = field(default_factory=dict)  # seconds, by process id

    def listen(self, seconds: float) -> None:
        """Wait for a report, at most ``seconds``, and take in all that has arrived."""
        if not select.select([self.pipe], [], [], seconds)[0]:
            return
        data = os.read(self.pipe, 65536)
        # A read may end in the middle of a line.
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.said.update(json.loads(line))
        # End of file: the driver has closed the pipe and is about to end. select would return at
        # once from now on, so without this wait the caller would poll in a busy loop.
        if not data:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(seconds)

    def kill_if_stopped(self) -> None:
        """Kill the driver, or a process of its private Ray cluster, that a signal (SIGSTOP) has
        stopped for longer than ``--status-timeout``, for the latter plus :data:`_AFTER_DRIVER`; 0
        disables this. What follows is the same as if the process had died.

        After Ctrl-Z, this process is stopped as well, and that time does not count.
        """
        import psutil

        now = time.monotonic()
        passed = min(now - self._looked, 2 * _POLL_SECONDS)
        self._looked = now
        limit = self.said["began"]["status_timeout"] if "began" in self.said else 0.0
        for what, process in self._watched(now) if limit > 0 else ():
            most = limit if process.pid == self.child.pid else limit + _AFTER_DRIVER
            stopped = False
            with contextlib.suppress(psutil.NoSuchProcess):
                stopped = process.status() == psutil.STATUS_STOPPED
            self._stopped[process.pid] = (
                self._stopped.get(process.pid, 0.0) + passed if stopped else 0.0
            )
            if most < self._stopped[process.pid]:
                self._stopped[process.pid] = 0.0
                _say(f"{what} was stopped for {limit:.0f} s (--status-timeout)")
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def _watched(self, now: float) -> list[tuple[str, psutil.Process]]:
        import psutil

        if now > self._searched + _LOOK_SECONDS:
            self._searched = now
            self._of_ray = []
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if (name := process.name()).startswith(OF_RAY):
                        self._of_ray.append(
                            (name if name.startswith("ray::") else f"Ray's {name}", process)
                        )
        with contextlib.suppress(psutil.NoSuchProcess):
            return [("the driver", psutil.Process(self.child.pid)), *self._of_ray]
        return self._of_ray

    def ended_in_order(self) -> bool:
        """Whether the driver reported that the run is over.

        Then it has ended the processes of the run itself, and any that remain were left by user
        code on purpose.
        """
        return "over" in self.said and "lost" not in self.said

    def next_settings(self) -> dict[str, object] | None:
        """Settings of the next driver, once this one has ended; None if the run must not be
        restarted.
        """
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
        """Run drivers until one ends for good; returns its exit status."""
        # Processes whose parents die become children of this one, so that they can be ended.
        adopt_orphans()
        for number in FORWARDED:
            signal.signal(number, self._on_signal)
        while True:
            driver = self._start()
            # The signal came when there was no driver to forward it to.
            if self.stopped_by is not None:
                driver.child.send_signal(FORWARDED[signal.Signals(self.stopped_by)])
            while driver.child.poll() is None:
                driver.listen(_POLL_SECONDS)
                driver.kill_if_stopped()
                _reap_others(driver.child.pid)
            driver.listen(0.0)  # The last reports may have come after the last look into the pipe.
            os.close(driver.pipe)
            code = driver.child.returncode
            cut_off = code != 0 and bool(driver.said.get("in_shutdown"))
            # Before the next driver starts: engines and ranks of the old one still hold GPU memory
            # and ports.
            if cut_off or not driver.ended_in_order():
                end_descendants(LEFT_SECONDS)
            following = driver.next_settings()
            if self.stopped_by is not None or following is None:
                if cut_off:
                    _sweep()
                if cut_off and driver.said["complete"]:
                    how = f"signal {-code}" if code < 0 else f"exit code {code}"
                    _say(f"the run is complete; its driver was lost in the shutdown ({how})")
                    return 0
                return self._status(code)
            if "lost" not in driver.said:  # The driver could not print this itself.
                left = driver.said["began"]["max_restarts"] - 1
                where = "its last snapshot" if driver.said.get("saved") else "where it began"
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                _say(
                    f"lost the driver ({how}): going on from {where} ({left} more restarts, "
                    "--max-restarts)"
                )
            self.settings |= following

    def _start(self) -> Driver:
        ours, theirs = os.pipe()
        child = subprocess.Popen(
            [sys.executable, *self.words],
            env={
                **os.environ,
                PIPE_VARIABLE: str(theirs),
                SETTINGS_VARIABLE: json.dumps(self.settings),
            },
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
        # A forwarded signal killed the driver before it had installed its handlers. To the user, it
        # was the original.
        if self.stopped_by is not None and -code in FORWARDED.values():
            return 128 + self.stopped_by
        return 128 - code


def _say(text: str) -> None:
    """Print a line to stderr, also if nobody reads it any more: if this process ended, the run
    would end with it.
    """
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _sweep() -> None:
    """Remove what a driver does not remove that ends in its shutdown: Ray exits a process whose GCS
    is gone.
    """
    from slime.weights.transports.shared_memory import sweep_shared_memory

    sweep_shared_memory()


def end_descendants(seconds: float) -> None:
    """Wait until all descendants of this process have ended, and kill those that are left after
    ``seconds``.

    Processes that are still there :data:`KILLED_SECONDS` later (blocked in the kernel, or of
    another user) are left behind with a message on stderr.
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
            _say(f"processes {pids} cannot be killed; they may keep memory or ports")
            return
        # Killed again in every round: a process may start another one while it is being killed.
        if time.monotonic() > until:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    process.kill()
        time.sleep(0.2)  # Each round reads all of /proc.


def _reap_others(driver: int) -> None:
    """Reap ended processes that this one has adopted, but not the driver: its exit status belongs
    to ``Popen``.
    """
    # WNOWAIT leaves a found process unreaped, so it can be told whether it is the driver before its
    # status is taken.
    with contextlib.suppress(ChildProcessError):
        while (
            found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ) and found.si_pid != driver:
            os.waitpid(found.si_pid, os.WNOHANG)


if __name__ == "__main__":
    sys.exit(Supervisor(sys.argv[2:]).run())
