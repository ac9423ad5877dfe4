"""Server processes: start them on a free port, watch them, and stop them with all their
children.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit

from slime.engines.http import request_blocking

if TYPE_CHECKING:
    import psutil


TAIL_BYTES = 4000
STOP_SECONDS = 10.0
POLL_SECONDS = 0.1
FROZEN_SECONDS = 60.0
"""A server of which a process is stopped (SIGSTOP) for so long is killed, in any phase: its start
and an update of its weights may take far longer, and meanwhile nothing else distinguishes a frozen
server from a busy one."""
LOOK_SECONDS = 10.0  # between two looks at the states of the processes
PROXY_VARIABLES = tuple(
    name
    for scheme in ("http", "https", "all")
    for name in (f"{scheme}_proxy", f"{scheme}_proxy".upper())
)
# above the ports of Ray's workers, below the ports of outgoing connections
_PORTS = range(20_000, 32_768)
# the sockets that mark ports of free_port() as taken
_marks: dict[tuple[str, int], socket.socket] = {}


class ServerFailed(RuntimeError):
    """A server ended or did not become ready in time. The message contains its last log lines."""


class ServerProcess:
    """One child process that serves HTTP.

    Args:
        what: The name of the server in error messages.
        url: The address at which the server will listen.
        log_path: The file for stdout and stderr; None discards them.
        env: Variables that are set in addition to the environment of this process.
        ports: Further ports of :func:`free_port`, which are released when the server is stopped or
            killed.

    Attributes:
        pid: The process id of the child.
        fate: Why the server was killed by its own watch; empty if it was not. It continues a
            sentence.
    """

    def __init__(
        self,
        what: str,
        command: list[str],
        url: str,
        log_path: str | Path | None,
        env: dict[str, str],
        ports: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.what = what
        self.url = url
        self.ports = tuple(ports)
        self.log_path = Path(log_path) if log_path else None
        if self.log_path:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path or os.devnull, "ab") as log:
            self.child = self.start(command, log, {**os.environ, **env})
        self.pid = self.child.pid
        self.fate = ""
        threading.Thread(target=self._end_if_frozen, name=f"watch-{self.pid}", daemon=True).start()

    def start(
        self, command: list[str], log: IO[bytes], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )

    def alive(self) -> bool:
        return self.child.poll() is None

    def wait_ready(self, deadline: float) -> None:
        """Wait until ``/health`` answers with status 200.

        Args:
            deadline: The time limit in seconds from now.

        Raises:
            ServerFailed: The process ended, or the deadline passed. In the second case the process
                is stopped.
        """
        start = time.monotonic()
        while not _healthy(self.url):
            waited = time.monotonic() - start
            if not self.alive():
                raise ServerFailed(
                    f"{self.what} (pid {self.pid}) ended with status "
                    f"{self.child.returncode}{self.fate}:\n"
                    f"{self.log_tail()}"
                )
            if waited > deadline:
                self.stop()
                tail = self.log_tail()
                raise ServerFailed(
                    f"{self.what} (pid {self.pid}) was not healthy after {waited:.0f} s:\n{tail}"
                )
            time.sleep(POLL_SECONDS)

    def _end_if_frozen(self) -> None:
        """Kill the server when it or a descendant has been stopped by a signal for
        :data:`FROZEN_SECONDS`.
        """
        moving = time.monotonic()
        while self.alive():
            time.sleep(LOOK_SECONDS)
            if not self._frozen():
                moving = time.monotonic()
            elif time.monotonic() - moving > FROZEN_SECONDS and self.alive():
                self.fate = (
                    f": a signal (SIGSTOP) had stopped it for {FROZEN_SECONDS:.0f} s, so it was "
                    "killed"
                )
                self.kill()

    def _frozen(self) -> bool:
        """Whether a signal holds the process or one of its descendants. One in a debugger is left
        alone.
        """
        import psutil

        with contextlib.suppress(psutil.Error):
            top = psutil.Process(self.pid)
            return any(
                one.status() == psutil.STATUS_STOPPED
                for one in (top, *top.children(recursive=True))
            )
        return False

    def stop(self) -> None:
        """Send SIGTERM, after :data:`STOP_SECONDS` SIGKILL, and wait until the process is gone."""
        if self.alive():
            self.child.send_signal(signal.SIGTERM)
            try:
                self.child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        self._release_ports()

    def kill(self) -> None:
        """Send SIGKILL to the process and its descendants, and wait until they are gone.

        The wait is limited to :data:`STOP_SECONDS`, because a device driver may hold a killed
        process in the kernel.
        """
        import psutil

        tree: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.pid)
            top.suspend()  # so that it starts no further child after the list was read
            tree = top.children(recursive=True)
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(STOP_SECONDS)
        wait_gone(tree, STOP_SECONDS)
        self._release_ports()

    def _release_ports(self) -> None:
        for host, port in self.ports:
            release_port(host, port)

    def cpu_seconds(self) -> float:
        """Return the CPU time that the process and its descendants have used; 0 after the process
        has ended.
        """
        import psutil

        used = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.pid)
            for process in (top, *top.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    used += times.user + times.system
        return used

    def log_tail(self) -> str:
        """Return the last :data:`TAIL_BYTES` of the server's output."""
        if self.log_path is None or not self.log_path.exists():
            return "(no log)"
        with open(self.log_path, "rb") as log:
            log.seek(max(self.log_path.stat().st_size - TAIL_BYTES, 0))
            return log.read().decode(errors="replace").strip() or "(it wrote nothing)"


class EngineProcess(ServerProcess):
    """An inference server."""

    bootstrap_port: int | None = None
    """The port at which a prefill server hands over its KV cache; None for other servers."""


def without_proxy(model: str | None = None, host: str = "") -> dict[str, str]:
    """Return environment variables with which a server reaches the other servers of the run without
    a proxy.

    Args:
        model: What the server loads. If it is not a local folder, the server may need the proxy to
            reach the model hub. In this case only ``host`` and the loopback addresses are exempt.
    """
    # The HTTP client of the router does not support NO_PROXY=*, so the proxy variables are emptied
    # as well.
    if model is None or os.path.isdir(model):
        return {**dict.fromkeys(PROXY_VARIABLES, ""), "NO_PROXY": "*", "no_proxy": "*"}
    return exempt_from_proxy(host)


def exempt_from_proxy(host: str) -> dict[str, str]:
    """Return environment variables with which only ``host`` and this machine are reached without a
    proxy.
    """
    exempt_before = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    exempt = ",".join(
        dict.fromkeys(filter(None, (*exempt_before, "localhost", "127.0.0.1", "::1", host)))
    )
    return {"NO_PROXY": exempt, "no_proxy": exempt}


def wait_gone(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait at most ``seconds`` until the processes have ended, and return those that still run.

    ``psutil.wait_procs`` is not used: on new kernels it raises an error if a process ends during
    the call (``pidfd_open``: ENOENT).
    """
    import psutil

    def lives(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    until = time.monotonic() + seconds
    while (
        left := [process for process in processes if lives(process)]
    ) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    return left


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port on which nobody listens, and reserve it until :func:`release_port` or the end
    of this process.

    A server may take half a minute until it listens, and nobody else must get its port meanwhile.
    Two things prevent it: the port is outside the range from which the kernel chooses ports for
    outgoing connections, and the UDP port of the same number is kept bound, which marks the port as
    taken for all calls of this function on the same host.
    """
    # does not advance the seeded generator of the run
    first = random.SystemRandom().randrange(len(_PORTS))
    for port in (*_PORTS[first:], *_PORTS[:first]):
        mark = socket.socket(type=socket.SOCK_DGRAM)
        try:
            mark.bind((host, port))
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError:
            mark.close()
            continue
        _marks[host, port] = mark
        return port
    raise ServerFailed(f"no port between {_PORTS.start} and {_PORTS.stop - 1} is free on {host}")


def release_port(host: str, port: int) -> None:
    """Release a port of :func:`free_port`. Other ports are ignored."""
    mark = _marks.pop((host, port), None)
    if mark is not None:
        mark.close()


def _healthy(url: str) -> bool:
    try:
        return request_blocking("GET", f"{url}/health", timeout=5.0)[0] == 200
    except OSError:
        return False


def address_towards(urls: Sequence[str]) -> str:
    """Return an address of this host that all engines can reach.

    It is the loopback address if all engines are on loopback, otherwise the source address of a
    connection to the first engine that is not.
    """
    hosts = {urlsplit(url).hostname or "127.0.0.1" for url in urls}
    addresses = {
        host: socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0] for host in sorted(hosts)
    }
    far = [info for info in addresses.values() if not ipaddress.ip_address(info[4][0]).is_loopback]
    if not far:
        return "127.0.0.1"
    family, _, _, _, target = far[0]
    with contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        # connecting a UDP socket sends nothing; it only selects the source address
        probe.connect((target[0], 9))
        return str(probe.getsockname()[0])
