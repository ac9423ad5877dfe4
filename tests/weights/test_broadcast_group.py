"""The trainer's side of the process group, against members that join as engines do; kill and stop
them.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import quick_processes
import torch

from slime.engines.payload import Bucket, layout
from slime.engines.process import address_towards
from slime.engines.sglang_api import Broadcast, Capabilities, EngineError, EngineInfo
from slime.models.digest import tensor_digest
from slime.weights.transports.distributed import DistributedTransport
from slime.weights.update import WeightUpdate

pytestmark = pytest.mark.real
# elements: too large for the socket buffers, so a member that hangs holds the sender up
LARGE = 6_000_000


def _member(pipe: Connection) -> None:
    """A process with as much of an engine as a broadcast needs; one command after the other."""
    import torch.distributed as dist

    from slime.plugins.embedded.routes_weights import join_group

    torch.set_num_threads(1)
    groups: dict[str, Any] = {}
    pipe.send("up")
    while True:
        command, *details = pipe.recv()
        try:
            if command == "join":
                address, port, rank, size, name, backend = details
                groups[name] = join_group(
                    address, port, rank, size, name, backend, timedelta(seconds=60)
                )
                pipe.send(None)
            elif command == "receive":
                names, dtypes, shapes, name, flat = details
                digests, tensors = {}, []
                for tensor_name, dtype, shape in zip(names, dtypes, shapes, strict=True):
                    tensors.append((tensor_name, torch.empty(shape, dtype=getattr(torch, dtype))))
                if flat:
                    entries, size = layout(tensors, alignment=1)
                    buffer = torch.empty(size, dtype=torch.uint8)
                    dist.broadcast(buffer, 0, group=groups[name])
                    tensors = [(entry.name, entry.view(buffer)) for entry in entries]
                for tensor_name, tensor in tensors:
                    if not flat:
                        dist.broadcast(tensor, 0, group=groups[name])
                    digests[tensor_name] = tensor_digest(tensor)
                pipe.send(digests)
            elif command == "leave":
                dist.destroy_process_group(groups.pop(details[0]))
                pipe.send(None)
        except Exception as error:
            pipe.send(EngineError(f"{type(error).__name__}: {error}"))


class Member:
    """The handle of such a process."""

    def __init__(self, index: int) -> None:
        context = quick_processes.context()
        self.pipe, far = context.Pipe()
        self.url = f"http://127.0.0.1:{index}"
        self.process = context.Process(target=_member, args=(far,), daemon=True)
        self.process.start()
        far.close()
        self.digests: dict[str, str] = {}
        self.capabilities = Capabilities()
        self.busy = asyncio.Lock()

    async def _ask(self, *command: Any) -> Any:
        async with self.busy:
            self.pipe.send(command)
            while not self.pipe.poll():
                await asyncio.sleep(0.01)
            try:
                answer = self.pipe.recv()
            except EOFError as error:
                raise EngineError(f"{self.url}: connection closed") from error
        if isinstance(answer, EngineError):
            raise answer
        return answer

    async def info(self) -> EngineInfo:
        status = Path(f"/proc/{self.process.pid}/stat")
        state = status.read_text().split()[2] if self.process.is_alive() else "X"
        if state in "XZ":
            raise EngineError(f"{self.url}: connection refused")
        while state == "T":  # a stopped process accepts the connection and never answers
            await asyncio.sleep(0.05)
        return EngineInfo("test", "0", "none", "0.0", "float32")

    async def init_group(self, *details: Any) -> None:
        await self._ask("join", *details)

    async def receive(self, broadcast: Broadcast) -> None:
        details = (
            broadcast.names,
            broadcast.dtypes,
            broadcast.shapes,
            broadcast.group_name,
            broadcast.flat,
        )
        self.digests.update(await self._ask("receive", *details))

    async def destroy_group(self, name: str) -> None:
        await self._ask("leave", name)


def is_up(member: Member) -> bool:
    return member.pipe.poll(60) and member.pipe.recv() == "up"


@pytest.fixture
def members() -> Iterator[list[Any]]:
    started = [Member(i) for i in range(1, 3)]
    assert all(is_up(member) for member in started)
    yield started
    for member in started:
        member.process.kill()
        member.process.join(5)


def update(buckets: int, size: int = 1000) -> WeightUpdate:
    tensors = [(f"t{i}", torch.full((size,), float(i))) for i in range(buckets)]
    made = [Bucket(i, [pair], i == buckets - 1) for i, pair in enumerate(tensors)]
    # of several element sizes, and not in the order in which they could lie end to end
    made[0].tensors = [
        ("flag", torch.tensor([True, False, True])),
        ("t0", torch.randn(7, 3).bfloat16().T),
        ("long", torch.arange(5)),
        ("scalar", torch.tensor(2.5)),
    ]
    return WeightUpdate("0.1", made)


def transport(deadline: float = 20.0) -> DistributedTransport:
    # a member that is well may be slow on a busy machine
    made = DistributedTransport("gloo", deadline, grace=8.0)
    made.stall = 2.0
    return made


async def check_sync(transport: DistributedTransport, engines: list[Any]) -> None:
    sent = update(4)
    assert await transport.connect(engines) == {}
    result = await transport.send(sent, engines)
    assert not result.failed and not result.torn and result.tensors == 7
    expected = {
        name: tensor_digest(tensor) for bucket in sent.buckets for name, tensor in bucket.tensors
    }
    for engine in engines:
        assert engine.digests.items() >= expected.items()


@pytest.mark.slow
@pytest.mark.parametrize("flat", [False, True])
async def test_every_member_gets_the_same_bytes_and_no_default_group_is_made(
    members: list[Any], flat: bool
) -> None:
    distributed = transport()
    for member in members:
        member.capabilities = Capabilities(flat_broadcast=flat)
    await check_sync(distributed, members)
    await check_sync(distributed, members)  # the group is used again
    assert distributed.groups_made == 1 and not torch.distributed.is_initialized()
    await check_sync(distributed, members[:1])  # another set of engines: another group
    assert distributed.groups_made == 2
    await distributed.close()


@pytest.mark.slow
async def test_a_trainer_whose_own_groups_connect_lazily_reaches_engines_whose_groups_do_not(
    members: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # after the members have started; torch reads it for each group
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    distributed = transport()
    await check_sync(distributed, members)
    await distributed.close()


BLOWS = pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])


@pytest.mark.slow
@BLOWS
async def test_a_member_lost_before_a_bucket_is_named_and_the_others_are_well(
    members: list[Any], blow: int
) -> None:
    distributed = transport(deadline=12.0)
    await check_sync(distributed, members)
    lost, well = members
    receive = lost.receive

    async def struck(broadcast: Broadcast) -> None:
        if broadcast.names == ["t2"]:
            os.kill(lost.process.pid, blow)
        await receive(broadcast)

    lost.receive = struck
    async with asyncio.timeout(120):  # it ends by itself
        result = await distributed.send(update(4), members)
    assert list(result.failed) == [lost.url] and result.torn == [well.url]
    await check_sync(distributed, [well])
    await distributed.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "blow",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)],
    ids=["killed", "stopped"],
)
async def test_a_member_lost_within_a_bucket_is_named_and_the_next_sync_works(
    members: list[Any], blow: int
) -> None:
    distributed = transport(deadline=12.0)
    await check_sync(distributed, members)
    lost, other = members

    async def strike() -> None:
        await asyncio.sleep(0.3)
        os.kill(lost.process.pid, blow)

    task = asyncio.create_task(strike())
    async with asyncio.timeout(120):
        result = await distributed.send(update(40, LARGE), members)
    await task
    if result.torn:
        assert list(result.failed) == [lost.url] and result.torn == [other.url]
    else:  # gloo had written a part of the other one's tensor
        assert list(result.failed) == [lost.url, other.url]
        assert "broadcast of" in str(result.failed[other.url])
        other = Member(3)
        members.append(other)
        assert is_up(other)
    await check_sync(distributed, [other])
    await distributed.close()


@pytest.mark.slow
async def test_a_member_that_is_dead_before_the_start_is_left_out(members: list[Any]) -> None:
    distributed = transport()
    members[0].process.kill()
    members[0].process.join(5)
    failed = await distributed.connect(members)
    assert list(failed) == [members[0].url]
    await check_sync(distributed, members[1:])
    await distributed.close()


@pytest.mark.slow
async def test_a_member_that_hangs_while_joining_is_left_out(members: list[Any]) -> None:
    distributed = transport(deadline=8.0)
    hung, well = members
    join = hung.init_group

    async def hang(*details: Any) -> None:
        os.kill(hung.process.pid, signal.SIGSTOP)
        await join(*details)

    hung.init_group = hang
    failed = await distributed.connect(members)
    assert list(failed) == [hung.url]
    await check_sync(distributed, [well])
    await distributed.close()


def test_loopback_engines_are_met_on_loopback() -> None:
    assert address_towards(["http://127.0.0.1:1", "http://localhost:2"]) == "127.0.0.1"
    assert address_towards(["http://127.0.0.1:1", "http://192.0.2.7:2"]) != "127.0.0.1"
