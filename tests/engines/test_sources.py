"""More connections to one server of this machine than one address has ports."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

IN_NAMESPACE = """
import asyncio, json, resource, sys
from collections import Counter
from aiohttp import web
from slime.engines.http import close_session, request

async def main(host, count):
    peers, all_there = Counter(), asyncio.Event()

    async def answer(asked):
        peers[asked.remote] += 1
        if peers.total() == count:
            all_there.set()
        await all_there.wait()  # each holds its connection until all have one
        return web.json_response("ok")

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, host, 21001).start()
    url = f"http://{host}:21001/"
    asked = [asyncio.create_task(request("GET", url, None, 120.0)) for _ in range(count)]
    done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
    for task in waiting:
        task.cancel()
    failed = [str(task.exception()) for task in done if task.exception()]
    print(json.dumps({"failed": failed[:3], "peers": peers}))
    await close_session()
    await runner.cleanup()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.real
@pytest.mark.parametrize(
    "host", ["127.0.0.1", "10.98.7.6"], ids=["loopback", "an address of the machine"]
)
def test_a_server_of_this_machine_takes_more_connections_than_an_address_has_ports(
    host: str,
) -> None:
    """100 ports in a network namespace, and 250 requests that all wait for one another."""
    prepare = (
        f"ip link set lo up && (ip addr add {host}/32 dev lo || true) 2>/dev/null"
        " && echo '40000 40099' > /proc/sys/net/ipv4/ip_local_port_range"
    )
    try:
        allowed = subprocess.run(
            ["unshare", "-Urn", "sh", "-c", prepare], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if allowed.returncode:
        pytest.skip(f"no network namespace here: {allowed.stderr.strip()}")
    command = f'{prepare} && exec {sys.executable} -c "$0" {host} 250'
    ended = subprocess.run(
        ["unshare", "-Urn", "sh", "-c", command, IN_NAMESPACE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert said["failed"] == []
    assert sum(said["peers"].values()) == 250 and max(said["peers"].values()) <= 100
