"""Where the ranks of a trainer listen."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RANK = """
import json, sys
from datetime import timedelta
import psutil, torch
import torch.distributed as dist
from slime.backends.create import _init_process_group

rank, world_size, port = map(int, sys.argv[1:])
_init_process_group(rank, world_size, "127.0.0.1", port, torch.device("cpu"), timedelta(minutes=2))
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
dist.all_reduce(total, group=dist.new_group(list(range(world_size))))
listening = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
dist.barrier()
print(json.dumps([total.item(), listening]))
dist.destroy_process_group()
"""


def run_ranks(script: str, world_size: int) -> list[Any]:
    """What each rank of a script prints."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-c", script]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), port], stdout=subprocess.PIPE, text=True
        )
        for rank in range(world_size)
    ]
    try:
        return [json.loads(rank.communicate(timeout=200)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.real
@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_of_a_private_cluster_listen_on_the_loopback_interface_only(world_size: int) -> None:
    said = run_ranks(RANK, world_size)
    addresses = {address for _, listening in said for address in listening}
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert {total for total, _ in said} == {1.0 if world_size == 1 else 6.0}


CONNECTIONS = """
import json, sys
from datetime import timedelta
import psutil, torch
import torch.distributed as dist
from slime.backends.create import _init_process_group

rank, world_size, port = map(int, sys.argv[1:])

_init_process_group(rank, world_size, "127.0.0.1", port, torch.device("cpu"), timedelta(minutes=2))
store = dist.distributed_c10d._get_default_store()

def count():
    # open connections to other ranks, while all ranks are here
    found.append(None)
    for place in ("arrived", "counted"):
        store.set(f"{place} {len(found)} {rank}", "")
        store.wait([f"{place} {len(found)} {other}" for other in range(world_size)])
        if place == "arrived":
            open_ = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]
            found[-1] = sum(port not in (c.laddr.port, c.raddr.port) for c in open_)  # not those to the store

found = []
second = dist.new_group(backend="gloo")
count()
dist.all_reduce(torch.ones(1))
count()
everyones = [None] * world_size
dist.all_gather_object(everyones, rank, group=second)
assert everyones == list(range(world_size))
count()
print(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.real
def test_ranks_are_connected_when_they_have_something_to_say_to_each_other() -> None:
    """A connection between all ranks, for each group, is more than a thousand ranks can open."""
    neighbours = 2  # in a ring
    for counts in run_ranks(CONNECTIONS, world_size=5):
        assert counts == [0, neighbours, 2 * neighbours]


UNDER_TORCHRUN = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from slime.backends.create import _init_process_group

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
assert not address[0].isdigit(), address  # a name, which is no IP address
_init_process_group(rank, world_size, address, port, torch.device("cpu"), timedelta(minutes=2))
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
assert total.item() == 3.0
dist.destroy_process_group()
"""


@pytest.mark.real
def test_under_torchrun_the_agents_store_and_its_host_name_are_used(tmp_path: Path) -> None:
    """As tools/convert_to_hf.py is started."""
    (tmp_path / "worker.py").write_text(UNDER_TORCHRUN)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        [*launcher, str(tmp_path / "worker.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
