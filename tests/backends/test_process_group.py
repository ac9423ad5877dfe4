"""Where the ranks of a trainer listen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from quick_processes import start_ranks

from slime.backends.create import _init_process_group
from slime.engines.process import free_port


def run_ranks(worker: Callable[..., None], folder: Path, world_size: int) -> list[Any]:
    """What each rank writes: they are forked from a process that has imported torch."""
    start_ranks(worker, (world_size, free_port("127.0.0.1"), folder), world_size, join=True)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def join(rank: int, world_size: int, port: int) -> None:
    wait = timedelta(minutes=2)
    _init_process_group(rank, world_size, "127.0.0.1", port, torch.device("cpu"), wait)


def listening(rank: int, world_size: int, port: int, folder: Path) -> None:
    """Write a sum over ranks, and the addresses at which this rank listens."""
    join(rank, world_size, port)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    dist.all_reduce(total, group=dist.new_group(list(range(world_size))))
    found = psutil.Process().net_connections("inet")
    addresses = [c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN]
    dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps([total.item(), addresses]))
    dist.destroy_process_group()


@pytest.mark.real
@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_of_a_private_cluster_listen_on_the_loopback_interface_only(
    world_size: int, tmp_path: Path
) -> None:
    said = run_ranks(listening, tmp_path, world_size)
    addresses = {address for _, listening in said for address in listening}
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert {total for total, _ in said} == {1.0 if world_size == 1 else 6.0}


def connecting(rank: int, world_size: int, port: int, folder: Path) -> None:
    """Write the number of open connections to other ranks, after each thing that ranks say to each
    other.
    """
    join(rank, world_size, port)
    store = dist.distributed_c10d._get_default_store()
    found: list[int] = []

    def count() -> None:
        """While all ranks are here."""
        number = len(found)
        for place in ("arrived", "counted"):
            store.set(f"{place} {number} {rank}", "")
            store.wait([f"{place} {number} {other}" for other in range(world_size)])
            if place == "arrived":
                sockets = psutil.Process().net_connections("tcp")
                open_ = [c for c in sockets if c.status == psutil.CONN_ESTABLISHED]
                # not those to the store
                found.append(sum(port not in (c.laddr.port, c.raddr.port) for c in open_))

    second = dist.new_group(backend="gloo")
    count()
    dist.all_reduce(torch.ones(1))
    count()
    everyones: list[Any] = [None] * world_size
    dist.all_gather_object(everyones, rank, group=second)
    assert everyones == list(range(world_size))
    count()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.real
def test_ranks_are_connected_when_they_have_something_to_say_to_each_other(tmp_path: Path) -> None:
    """A connection between all ranks, for each group, is more than a thousand ranks can open."""
    neighbours = 2  # in a ring
    for counts in run_ranks(connecting, tmp_path, world_size=5):
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
