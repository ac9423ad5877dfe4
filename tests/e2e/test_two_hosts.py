"""Two hosts: network namespaces of this machine with an address each, connected by a cable. One is
the head of a Ray cluster, the other joins it; one trains and the other generates.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.long]
CHECKOUT = Path(__file__).resolve().parents[2]
HEAD_PORT = 6379
PORTS = range(40_000, 50_000)
"""The ports of ``net.ipv4.ip_local_port_range`` on both hosts."""
RAY_PORTS = range(10_002, 20_000)
SLIME_PORTS = range(20_000, 32_768)
OPEN = (range(HEAD_PORT, HEAD_PORT + 1), RAY_PORTS, SLIME_PORTS, PORTS)
"""The ports that the page on nodes names. The firewall between the hosts closes all others."""
HOOKS = """
import json, socket, urllib.error, urllib.request
import psutil

def addresses():
    nics = psutil.net_if_addrs().values()
    return [a.address for nic in nics for a in nic if a.family == socket.AF_INET]

def note(**facts):
    with open(OUT, "a") as file:
        file.write(json.dumps(facts) + "\\n")

def trainer(args, rollout_id, rollout_data):
    note(who="trainer", addresses=addresses())

def engines(rollout_id, args, samples, metrics, seconds):
    # A stranger in the network has no key, and is refused. No proxy is asked.
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/server_info"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        status = opener.open(url, timeout=10).status
    except urllib.error.HTTPError as error:
        status = error.code
    own = addresses()
    open_ones = [
        (c.laddr.ip, c.laddr.port, c.raddr.ip, c.raddr.port)
        for c in psutil.net_connections("tcp4")
        if c.raddr and c.raddr.ip != c.laddr.ip and not c.raddr.ip.startswith("127.")
    ]
    note(who="engine", address=args.sglang_router_ip, status=status, connections=open_ones)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def unavailable() -> str:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root and the program ip"
    name = f"try{os.getpid()}"
    rule = ["ip", "-n", name, "rule", "add", "ipproto", "tcp", "blackhole"]
    codes = [
        subprocess.run(words, capture_output=True).returncode
        for words in (["ip", "netns", "add", name], rule, ["ip", "netns", "del", name])
    ]
    return "there are no network namespaces with rules for ports here" if any(codes) else ""


class Hosts:
    """Two namespaces with a cable between them."""

    def __init__(self) -> None:
        unique = os.getpid() % 60_000
        self.names = (f"head{unique}", f"node{unique}")
        self.ends = (f"h{unique}", f"n{unique}")
        net = f"10.{200 + unique % 50}.{unique % 250}"
        self.addresses = (f"{net}.1", f"{net}.2")
        self.started: list[subprocess.Popen[bytes]] = []

    def connect(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        first, second = self.ends
        peer = ("peer", "name", second, "netns", self.names[1])
        ip("link", "add", first, "netns", self.names[0], "type", "veth", *peer)
        for name, end, address in zip(self.names, self.ends, self.addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "route", "add", "default", "via", address)
            limits = f"net.ipv4.ip_local_port_range={PORTS.start} {PORTS.stop - 1}"
            subprocess.run(["ip", "netns", "exec", name, "sysctl", "-qw", limits], check=True)
            self.close_ports(name)

    def close_ports(self, name: str) -> None:
        """Let a host send TCP packets to open ports of the other one only, by rules of its routes:
        not every kernel has a packet filter. Its own addresses have a table that comes first.
        """
        rules = [["dport", f"{ports.start}-{ports.stop - 1}", "lookup", "main"] for ports in OPEN]
        for number, rule in enumerate([*rules, ["blackhole"]], start=10):
            ip("-n", name, "rule", "add", "pref", str(number), "ipproto", "tcp", *rule)

    def reaches(self, port: int) -> bool:
        """Whether the first host can connect to a port of the second."""
        words = ["ip", "netns", "exec"]
        place = repr((self.addresses[1], port))
        listen = f"import socket; s = socket.create_server({place}); print(flush=True); s.accept()"
        listener = subprocess.Popen(
            [*words, self.names[1], sys.executable, "-c", listen], stdout=subprocess.PIPE
        )
        try:
            assert listener.stdout is not None and listener.stdout.readline()
            connect = f"import socket; socket.create_connection({place}, 5)"
            command = [*words, self.names[0], sys.executable, "-c", connect]
            return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
        finally:
            listener.kill()
            listener.communicate()

    def start(
        self, host: int, words: list[str], log: Path, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[host], sys.executable, *words],
                cwd=CHECKOUT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def unplug(self) -> None:
        """The second host is gone from the network, from one moment to the next."""
        ip("-n", self.names[1], "link", "set", self.ends[1], "down")

    def close(self) -> None:
        for process in reversed(self.started):
            children = (
                psutil.Process(process.pid).children(recursive=True)
                if process.poll() is None
                else []
            )
            for one in (process, *children):
                try:
                    one.send_signal(signal.SIGKILL)
                except (ProcessLookupError, psutil.NoSuchProcess):
                    continue
            process.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := unavailable():
        pytest.skip(reason)
    made = Hosts()
    try:
        made.connect()
        yield made
    finally:
        made.close()


@pytest.fixture
def environment(hosts: Hosts) -> dict[str, str]:
    """With a proxy that leads nowhere, as on machines whose way out is one."""
    proxy = "http://192.0.2.1:3128"
    return {
        **os.environ,
        "PYTHONPATH": str(CHECKOUT),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # slime keeps its own clusters on loopback with 0
        "RAY_enable_open_telemetry": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # what else runs on this machine is not the subject
        "http_proxy": proxy,
        "HTTP_PROXY": proxy,
        "no_proxy": "localhost,127.0.0.1," + ",".join(hosts.addresses),
    }  # fmt: skip


@pytest.fixture
def cluster(hosts: Hosts, environment: dict[str, str], tmp_path: Path) -> Path:
    """Start Ray on both hosts; the folder of its logs."""
    ray = ["-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1"]
    ray += ["--object-store-memory", "200000000"]
    session = f"/tmp/ray-two-{os.getpid()}"
    head = [
        "--head",
        "--port",
        str(HEAD_PORT),
        "--include-dashboard",
        "false",
        "--temp-dir",
        session,
    ]
    log = tmp_path / "ray.log"
    for host, more in enumerate((head, ["--address", f"{hosts.addresses[0]}:{HEAD_PORT}"])):
        words = [*ray, *more, "--node-ip-address", hosts.addresses[host]]
        hosts.start(host, words, log, environment)
        deadline = time.monotonic() + 180
        while log.read_text(errors="replace").count("Ray runtime started") <= host:
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
            time.sleep(0.5)
    return tmp_path


def start_run(
    hosts: Hosts, environment: dict[str, str], folder: Path, model: Path, *more: str
) -> tuple[subprocess.Popen[bytes], Path]:
    data = folder / "data.jsonl"
    row = {"prompt": "What is 2+2?", "label": "4"}
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(64)))
    hooks = folder / "hooks.py"
    hooks.write_text(f"OUT = {str(folder / 'notes.jsonl')!r}\n{HOOKS}")
    flags = [
        "--hf-checkpoint", str(model), "--prompt-data", str(data), "--rm-type", "random",
        "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8",
        "--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1",
        "--train-backend", "fsdp", "--rollout-backend", "embedded", "--output-dir", str(folder / "out"),
        "--run-name", "two", "--rollout-data-postprocess-path", f"{hooks}:trainer",
        "--custom-rollout-log-function-path", f"{hooks}:engines",
    ]  # fmt: skip
    address = {"RAY_ADDRESS": f"{hosts.addresses[0]}:{HEAD_PORT}"}
    log = folder / "run.log"
    return hosts.start(0, ["train.py", *flags, *more], log, {**environment, **address}), log


def notes(folder: Path) -> list[dict[str, object]]:
    file = folder / "notes.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_the_firewall_between_the_hosts_closes_other_ports(hosts: Hosts) -> None:
    assert hosts.reaches(HEAD_PORT) and hosts.reaches(RAY_PORTS.start)
    assert not hosts.reaches(HEAD_PORT + 1) and not hosts.reaches(PORTS.stop)


def test_one_host_trains_and_the_other_generates(
    hosts: Hosts, environment: dict[str, str], cluster: Path, smollm2: Path
) -> None:
    run, log = start_run(hosts, environment, cluster, smollm2, "--num-rollout", "2")
    assert run.wait(timeout=600) == 0, log.read_text(errors="replace")[-3000:]
    told = notes(cluster)
    (engine,) = {str(one["address"]) for one in told if one["who"] == "engine"}
    trainers = [one["addresses"] for one in told if one["who"] == "trainer"]
    assert len(trainers) == 2 and engine in hosts.addresses
    for own in trainers:
        assert isinstance(own, list) and engine not in own
        assert set(own) & set(hosts.addresses)
    assert {one["status"] for one in told if one["who"] == "engine"} == {401}
    # Only these ports have to be open between the hosts.
    crossing = [
        each
        for one in told
        if one["who"] == "engine"
        for each in one["connections"]  # type: ignore[attr-defined]
    ]
    assert crossing
    for _, mine, _, theirs in crossing:
        assert all(any(port in ports for ports in OPEN) for port in (mine, theirs)), (mine, theirs)


def test_a_host_that_vanishes_ends_the_run_with_a_report(
    hosts: Hosts, environment: dict[str, str], cluster: Path, smollm2: Path
) -> None:
    more = ("--num-rollout", "10000", "--phase-timeout", "90", "--distributed-timeout-minutes", "1")
    run, log = start_run(hosts, environment, cluster, smollm2, *more)
    deadline = time.monotonic() + 300
    while sum(one["who"] == "trainer" for one in notes(cluster)) < 2:
        assert run.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.5)
    hosts.unplug()
    assert run.wait(timeout=400) not in (0, None)
    text = log.read_text(errors="replace")
    assert hosts.addresses[1] in text or "died" in text or "lost" in text, text[-3000:]
