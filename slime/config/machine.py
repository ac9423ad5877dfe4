"""GPUs, cores and connection limits of this machine, determined without importing torch."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import ipaddress
import os
import re
import resource
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SOURCES = 254


@dataclass(frozen=True)
class Machine:
    """GPUs that torch can use (0 on a CPU machine), CPU cores of this process, and whether Ray has
    its own cluster.
    """

    gpus: int
    cores: int
    in_cluster: bool  # RAY_ADDRESS names a cluster; the run may use other machines than this one

    @property
    def cuda(self) -> bool:
        return self.gpus > 0


def this_machine() -> Machine:
    """Inspect devices, CPU affinity and environment, which takes about a millisecond."""
    return Machine(count_gpus(), len(os.sched_getaffinity(0)), bool(os.environ.get("RAY_ADDRESS")))


def count_gpus(devices: Path = Path("/dev")) -> int:
    """Count the GPUs that are visible to this process and that the installed torch can use."""
    if torch_is_cpu_build():
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA ignores the entries from the first -1 on.
        return len(
            names[: names.index("-1")] if "-1" in names else [name for name in names if name]
        )
    return sum(
        1 for device in devices.glob("nvidia[0-9]*") if re.fullmatch(r"nvidia\d+", device.name)
    )


@functools.cache
def torch_is_cpu_build() -> bool:
    """Return whether the installed torch cannot use a GPU, without an import of it."""
    return (version_of("torch") or "").endswith("+cpu")


def source_addresses(host: str) -> int:
    """Return the number of local addresses from which ``host`` can be reached. For a server on this
    machine these are the loopback addresses 127.0.0.1 to 127.0.0.254 (on Linux only); otherwise it
    is one."""
    return _SOURCES if sys.platform == "linux" and _is_local(host) else 1


@functools.cache
def _is_local(host: str) -> bool:
    """Whether ``host`` is an IPv4 address of this machine."""
    try:
        ipaddress.IPv4Address(host)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
            trial.bind((host, 0))
    except (OSError, ValueError):
        return False
    return True


def connection_limit(router: str | None = None, ports: Path = _PORTS) -> int:
    """Return the maximum number of concurrent requests from this machine to one router.

    Each request takes a port of a local address, and two open files of the router's process (one
    towards the client, one towards the engine). A router on this machine can be reached from many
    local addresses (:func:`source_addresses`), so there the open files are the limit. A tenth is
    reserved for other uses.

    Args:
        router: The router's address; None if the router will run on this machine.
    """
    # The router has a socket to the client and one to the engine for each request.
    limits = [resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 2]
    if limits[0] <= 0:  # no limit
        limits = []
    with contextlib.suppress(OSError, ValueError):
        first, last = map(int, ports.read_text().split())
        limits.append((last - first + 1) * source_addresses(router or "127.0.0.1"))
    return max(min(limits, default=sys.maxsize) * 9 // 10, 1)


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, for this process and the processes that
    it will start.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def cache_folder(what: str) -> Path:
    """Return the folder for what slime can make again, which may be removed at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slime" / what


def remember(mark: Path) -> None:
    """Create an empty file in the cache folder. Without a home that can be written to, nothing is
    remembered.
    """
    with contextlib.suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def version_of(package: str) -> str | None:
    """Return the version of an installed package without importing it; None if it is not
    installed.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed(module: str) -> bool:
    """Whether ``module`` could be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
