"""Connect to Ray, or start a private one for this run."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.cluster.actors import ClusterError
from slime.config.process import import_environment

if TYPE_CHECKING:
    import psutil

QUIET_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise Ray would hide the GPUs of a machine from actors that request none.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_open_telemetry": "0",
}

SHUTDOWN_SECONDS = 3.0
CONNECT_SECONDS = 10.0
_STARTS = 3  # attempts to start a private cluster
_TRIED = "2.60."  # the release of Ray of which some processes are left out
_LATE = "timed out during startup"
"""Part of Ray's message when its processes have not registered within 30 s, a limit that has no
setting. On a machine that was busy, it ended a run that was being restarted."""
_started: list[psutil.Process] = []
"""Ray's processes that :func:`connect` started, without those that they have started since."""
connected = False


def connect() -> None:
    """Join the cluster of ``RAY_ADDRESS`` (``ray start``, ``ray job submit``), or start a private
    one.

    A private cluster listens only on the loopback interface, asks for a token that only this run
    has, and ends with this process. If the program has called
    ``ray.init`` itself, its connection is used, and :func:`disconnect` leaves it open.
    """
    global connected
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        return
    package = Path(__file__).parents[2]
    other = Path("slime").absolute()
    if (other / "__init__.py").is_file() and not other.samefile(package):
        # Ray puts the working directory first, before anything that could be set here.
        raise ClusterError(
            f"Ray's workers would import {other} in place of {package}: start in another folder"
        )
    connected = True
    common: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "ERROR",
        "configure_logging": True,
    }
    # A submitted job has its own runtime environment.
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        common["runtime_env"] = {"env_vars": import_environment()}
    if address := os.environ.get("RAY_ADDRESS"):
        _require_listener(address)
        with _signals_left_to_us():
            ray.init(address=address, **common)
        return
    _start_private(common)


def _require_listener(address: str) -> None:
    """Refuse an address where nothing listens, such as that of a cluster that has ended: Ray tries
    it for a quarter of an hour, without a word, and no signal ends that.
    """
    services: Any = importlib.import_module("ray._private.services")
    found = None if "://" in address else services.canonicalize_bootstrap_address(address)
    host, _, port = (found or "").rpartition(":")
    if not port.isdigit():
        return  # Ray itself says what is wrong with other forms.
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise ClusterError(
            f"RAY_ADDRESS={address}: no Ray cluster answers at {found} ({error}): start it with "
            "`ray start --head`, or unset RAY_ADDRESS to give this run a cluster of its own"
        ) from error


def _start_private(common: dict[str, Any]) -> None:
    """Start a cluster of this process alone, with what :func:`connect` gives to ``ray.init``."""
    import psutil
    import ray

    before = psutil.Process().children()
    _require_own_token()
    # Nobody restarts the head of a private cluster, so waiting a minute for it, which is Ray's
    # default, is useless.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
    # Every actor has an environment of its own, so workers that Ray starts in advance would never
    # be used.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    # Ray's head keeps a record of the last 100,000 calls, 42 KiB per rollout of a small run, for a
    # dashboard that a private cluster does not have.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # Ray only counts CPUs. At least 4, so that a machine with fewer cores never leaves a placement
    # group pending.
    common |= {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    common |= {"num_cpus": max(os.cpu_count() or 1, 4), "object_store_memory": object_store_bytes()}
    for left in reversed(range(_STARTS)):
        try:
            with _signals_left_to_us(), _few_processes():
                ray.init(**common)
            break
        except Exception as error:  # Ray raises no class of its own
            # Ray only says that it has waited for its server in vain; why the server ended is in a
            # log of that.
            if words := last_words_of_ray(str(error)):
                raise ClusterError(f"Ray did not start: {words}") from error
            if _LATE not in str(error) or not left:
                raise
            print(
                f"Ray did not start in the 30 s that it gives itself; trying again: {error}",
                file=sys.stderr,
            )
            _kill(
                _with_descendants(
                    process for process in psutil.Process().children() if process not in before
                )
            )
    _started[:] = [process for process in psutil.Process().children() if process not in before]


@contextlib.contextmanager
def _signals_left_to_us() -> Iterator[None]:
    """While Ray starts, keep signals to this process group from its processes, and keep this
    process's own handler.

    ``timeout``, ``kill -- -PGID`` and some batch systems send SIGTERM to the whole process group.
    The snapshot that the driver then saves needs Ray's processes and the actors below them, so they
    get sessions of their own. They still end with this process: the kernel kills them, and they
    kill theirs. ``ray.init`` also installs a handler that exits at once, which must not replace one
    that saves.
    """
    services: Any = importlib.import_module("ray._private.services")
    utils: Any = importlib.import_module("ray._private.utils")
    popen = services.ConsolePopen
    set_handler = utils.set_sigterm_handler

    def set_missing_handler(handler: Any) -> None:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            set_handler(handler)

    services.ConsolePopen = functools.partial(popen, start_new_session=True)
    utils.set_sigterm_handler = set_missing_handler
    try:
        yield
    finally:
        services.ConsolePopen = popen
        utils.set_sigterm_handler = set_handler


@contextlib.contextmanager
def _few_processes() -> Iterator[None]:
    """While Ray starts, leave out those of its processes that a private cluster has no use for, and
    let its workers start at once.

    The monitor adds nodes, the log monitor sends lines of workers to the driver, and the API server
    serves the dashboard; ``ray.init`` waits for its start even without one. All three together take
    three seconds of a core. The agent of the node cannot be left out, but needs no HTTP server.
    Workers are started by :mod:`slime.plugins.actors.worker_start`. ``ray.init`` has settings for none of
    these, so with a release of Ray that was not tried, all of them start.
    """
    if not importlib.import_module("ray").__version__.startswith(_TRIED):
        yield
        return
    node: Any = importlib.import_module("ray._private.node").Node
    parameter: Any = importlib.import_module("ray._private.parameter")
    utils: Any = importlib.import_module("ray._private.utils")
    starter = str(Path(__file__).with_name("worker_start.py"))
    params = functools.partial(parameter.RayParams, setup_worker_path=starter)
    instead: list[tuple[Any, str, Any]] = [
        (node, "start_monitor", lambda self: None),
        (node, "start_log_monitor", lambda self: None),
        (node, "start_api_server", lambda self, **_: None),
        (utils, "get_dashboard_dependency_error", lambda: ImportError("left out")),
        (parameter, "RayParams", params),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, other in instead:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, other)
        yield


_SESSION = re.compile(r"(/\S*?/session_[^/\s]+)/")
_FATAL = re.compile(r"^.*(?:Unhandled exception|Check failed).*$", re.MULTILINE)


def last_words_of_ray(error: str) -> str:
    """Return why a server of Ray ended, from the logs of the session that an error names; empty if
    they do not say.
    """
    session = _SESSION.search(error)
    for log in sorted(Path(session[1], "logs").glob("*.out")) if session else ():
        with contextlib.suppress(OSError):
            if fatal := _FATAL.search(log.read_text(encoding="utf-8", errors="replace")):
                return f"{log}: {fatal[0][:300]}"
    return ""


def _with_descendants(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    import psutil

    family = list(processes)
    for process in tuple(family):
        with contextlib.suppress(psutil.NoSuchProcess):
            family += process.children(recursive=True)
    return family


def _kill(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, and wait until they are gone."""
    import psutil

    from slime.engines.process import wait_gone

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait_gone(processes, SHUTDOWN_SECONDS)


def _require_own_token() -> None:
    """Let Ray's processes of a private cluster refuse everyone who does not have this run's token.

    Other users of the machine can reach the ports on the loopback interface, and whoever submits a
    task there runs code as this user. Ray's own default is one token for all clusters of a user, in
    a file that others may read (``~/.ray/auth_token``, mode 0644). This token is only in the
    environment of this process and of its descendants. It remains for later runs of the same
    program, because Ray reads it once per process.

    ``RAY_AUTH_MODE`` is not set here. Ray reads it when it is imported, and if it is not set,
    ``ray.init`` turns tokens on for a new local cluster.
    """
    if os.environ.get("RAY_AUTH_MODE", "token") == "token" and not os.environ.get(
        "RAY_AUTH_TOKEN_PATH"
    ):
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def disconnect() -> None:
    """Leave the cluster that :func:`connect` has joined. A private one is ended with all its
    processes.

    Ray's own agents would notice only after half a minute that their cluster is gone, so they are
    killed here.
    """
    import ray

    from slime.engines.process import wait_gone

    global connected
    if not connected:
        return
    # Listed before the shutdown: afterwards their parents are gone, and they are no longer known as
    # descendants.
    connected = False
    children = _with_descendants(_started)
    _started.clear()
    ray.shutdown()
    _kill(wait_gone(children, SHUTDOWN_SECONDS))


def object_store_bytes() -> int:
    """Size of the object store: a tenth of the free memory, but at most four fifths of the free
    shared memory.

    This is small enough for a laptop, and on a machine with 300 GB it holds a rollout of 100,000
    samples of 32k tokens (30 GB). Ray writes objects that do not fit to the disk.
    """
    import psutil

    most = psutil.virtual_memory().available // 10
    with contextlib.suppress(OSError):
        most = min(most, psutil.disk_usage("/dev/shm").free * 4 // 5)
    return int(max(most, 256 * 2**20))
