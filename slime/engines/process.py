"""Server processes: started on a free port, watched, stopped by pid, never left behind."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from slime.engines.http import request_blocking

if TYPE_CHECKING:
    import psutil

    from slime.engines.settings import EngineSettings

TAIL_BYTES = 4000
STOP_SECONDS = 10.0
POLL_SECONDS = 0.1
PROXY_VARIABLES = tuple(
    name for scheme in ("http", "https", "all") for name in (f"{scheme}_proxy", f"{scheme}_proxy".upper())
)
_PORTS = range(20_000, 32_768)  # above those of Ray's workers, below those of outgoing connections
_marks: dict[tuple[str, int], socket.socket] = {}  # of the ports that free_port() gave out


class ServerFailed(RuntimeError):
    """A server ended, or did not become ready in time; the message holds its last log lines."""


class ServerProcess:
    """One child process that serves HTTP.

    Args:
        ports: of :func:`free_port` that are given back when it is stopped or killed.

    Attributes:
        url: where it listens.
        pid: of the child.
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
            self.child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **env}
            )
        self.pid = self.child.pid

    def alive(self) -> bool:
        return self.child.poll() is None

    def wait_ready(self, deadline: float) -> None:
        """Return when ``/health`` answers 200.

        Args:
            deadline: seconds from now.

        Raises:
            ServerFailed: the process ended, or the deadline passed; then it is stopped.
        """
        start = time.monotonic()
        while not _healthy(self.url):
            waited = time.monotonic() - start
            if not self.alive():
                raise ServerFailed(
                    f"{self.what} (pid {self.pid}) ended with status {self.child.returncode}:\n{self.log_tail()}"
                )
            if waited > deadline:
                self.stop()
                tail = self.log_tail()
                raise ServerFailed(f"{self.what} (pid {self.pid}) was not healthy after {waited:.0f} s:\n{tail}")
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """SIGTERM, after :data:`STOP_SECONDS` SIGKILL; returns when the process is gone."""
        if self.alive():
            self.child.send_signal(signal.SIGTERM)
            try:
                self.child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        self._release_ports()

    def kill(self) -> None:
        """SIGKILL to the process and all below it, also when they are stopped (SIGSTOP); returns when they are gone.

        A driver may hold a process in the kernel: it is not waited for longer than :data:`STOP_SECONDS`.
        """
        import psutil

        tree: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.pid)
            top.suspend()  # so that it starts nothing meanwhile
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
        """CPU time that the process and all below it have used; 0 once it has ended."""
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
        """The last lines that it wrote."""
        if self.log_path is None or not self.log_path.exists():
            return "(no log)"
        with open(self.log_path, "rb") as log:
            log.seek(max(self.log_path.stat().st_size - TAIL_BYTES, 0))
            return log.read().decode(errors="replace").strip() or "(it wrote nothing)"


class EngineProcess(ServerProcess):
    """An inference server."""

    bootstrap_port: int | None = None
    """Where a prefill server hands over its KV; None for other servers."""


def start_embedded_engine(
    settings: EngineSettings,
    index: int,
    host: str = "127.0.0.1",
    port: int | None = None,
    log_path: str | Path | None = None,
) -> EngineProcess:
    """Start embedded engine number ``index``; returns at once, see :meth:`ServerProcess.wait_ready`.

    The process ends when the calling process does, also when that is killed.
    """
    port = port or free_port(host)
    command = [sys.executable, "-m", "slime.engines.embedded.server", "--parent-pid", str(os.getpid())]
    command += ["--model-path", settings.model, "--host", host, "--port", str(port)]
    options = {
        "--dtype": settings.dtype,
        "--device": settings.device,
        "--max-running-requests": settings.max_running_requests,
        "--max-total-tokens": settings.max_total_tokens,
        "--threads": settings.threads,
    }
    for name, value in options.items():
        if value is not None:
            command += [name, str(value)]
    if settings.deterministic:
        command.append("--deterministic")
    if settings.trust_remote_code:
        command.append("--trust-remote-code")
    env = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    env |= without_proxy(settings.model, host)
    if settings.threads:
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(settings.threads)
    return EngineProcess(f"embedded engine {index}", command, f"http://{host}:{port}", log_path, env)


def without_proxy(model: str | None = None, host: str = "") -> dict[str, str]:
    """Environment in which a server reaches other servers of the run directly, whatever ``http_proxy`` says.

    Args:
        model: what the server loads. Where that is no folder, a proxy may be the way to the model hub: then only
            ``host`` and the loopback addresses are exempt.
    """
    if model is None or os.path.isdir(model):  # the router's client does not know NO_PROXY=*
        return {**dict.fromkeys(PROXY_VARIABLES, ""), "NO_PROXY": "*", "no_proxy": "*"}
    return exempt_from_proxy(host)


def exempt_from_proxy(host: str) -> dict[str, str]:
    """Environment in which ``host`` and this machine itself are reached directly, and the rest as before."""
    given = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    exempt = ",".join(dict.fromkeys(filter(None, (*given, "localhost", "127.0.0.1", "::1", host))))
    return {"NO_PROXY": exempt, "no_proxy": exempt}


def wait_gone(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until the processes have ended; returns those that have not after ``seconds``.

    ``psutil.wait_procs`` raises on new kernels when a process ends while it asks (``pidfd_open``: ENOENT).
    """
    import psutil

    def lives(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    until = time.monotonic() + seconds
    while (left := [process for process in processes if lives(process)]) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    return left


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now, and that no later call on this host is given while this process lives, or
    until :func:`release_port`.

    A server may take half a minute until it listens. Until then nobody else must get the port: it lies outside those
    that the kernel gives to outgoing connections, and the UDP port of the same number, kept bound, marks it as taken.
    """
    first = random.SystemRandom().randrange(len(_PORTS))  # the run's own generator stays as it is
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
    """A port of :func:`free_port` is not needed any more; a no-op for other ports."""
    mark = _marks.pop((host, port), None)
    if mark is not None:
        mark.close()


def _healthy(url: str) -> bool:
    try:
        return request_blocking("GET", f"{url}/health", timeout=5.0)[0] == 200
    except OSError:
        return False


def address_towards(urls: Sequence[str]) -> str:
    """This host's address as the engines see it: loopback only when all of them are on loopback."""
    hosts = {urlsplit(url).hostname or "127.0.0.1" for url in urls}
    addresses = {host: socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0] for host in sorted(hosts)}
    far = [info for info in addresses.values() if not ipaddress.ip_address(info[4][0]).is_loopback]
    if not far:
        return "127.0.0.1"
    family, _, _, _, target = far[0]
    with contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        probe.connect((target[0], 9))  # sends nothing: only asks the routing table
        return str(probe.getsockname()[0])
