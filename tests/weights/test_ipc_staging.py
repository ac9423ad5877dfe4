"""Buckets in shared memory: whole, aligned, opened by another process, and gone afterwards."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import psutil
import pytest
import quick_processes
import torch

from slime.engines.payload import Bucket
from slime.engines.sglang_api import EngineError
from slime.models.digest import tensor_digest
from slime.weights.transports import ipc, shared_memory
from slime.weights.transports.shared_memory import FileList, sweep_shared_memory
from slime.weights.update import WeightUpdate


def named(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ("a", torch.randn(33, 7, generator=generator)),
        ("scalar", torch.tensor(3.5, dtype=torch.float64)),
        ("turned", torch.randn(8, 3, generator=generator).T),
        ("half", torch.randn(5, generator=generator).bfloat16()),
        ("empty", torch.zeros(0, 4)),
        ("mask", torch.tensor([True, False, True])),
    ]


def segments() -> set[str]:
    """The files of this process. One that an earlier test left may be removed at any time."""
    return {
        name
        for name in os.listdir(shared_memory.SHARED_MEMORY)
        if name.startswith(f"torch_{os.getpid()}_")
    }


@pytest.fixture
def files() -> Iterator[FileList]:
    made = FileList()
    yield made
    made.close()


def test_staged_tensors_equal_the_originals_and_share_one_buffer(files: FileList) -> None:
    before = segments()
    staged = ipc.stage(Bucket(2, named(), last=True), [], files)
    assert staged.bucket.last and staged.bucket.index == 2 and staged.bucket.flat is not None
    storage = staged.bucket.flat.untyped_storage().data_ptr()
    for (name, tensor), (staged_name, view) in zip(named(), staged.bucket.tensors, strict=True):
        assert staged_name == name and view.dtype == tensor.dtype and torch.equal(view, tensor)
        assert view.numel() == 0 or view.untyped_storage().data_ptr() == storage
    assert len(segments() - before) == 1
    del view
    staged.drop()
    del staged
    gc.collect()
    assert segments() <= before


def test_too_little_shared_memory_is_an_error_not_a_dead_process(
    monkeypatch: pytest.MonkeyPatch, files: FileList
) -> None:
    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(shared_memory.os, "statvfs", lambda path: Full)
    with pytest.raises(MemoryError, match=r"--update-weight-buffer-size"):
        ipc.stage(Bucket(0, [("big", torch.zeros(10_000))]), [], files)


def _receive(pipe: Connection) -> None:
    """Another process: opens each bucket by name and answers with digests; b"die" ends it without a
    word.
    """
    torch.set_num_threads(1)
    while (message := pipe.recv()) is not None:
        if message == b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        tensors = ForkingPickler.loads(message)
        answer = {name: tensor_digest(tensor) for name, tensor in tensors}
        del tensors
        pipe.send(answer)


class OtherProcess:
    """As much of an engine as the transport needs, on the far side of a process border."""

    def __init__(self, url: str) -> None:
        context = quick_processes.context()
        self.url, (self.pipe, far) = url, context.Pipe()
        self.process = context.Process(target=_receive, args=(far,), daemon=True)
        self.process.start()
        far.close()
        self.digests: dict[str, str] = {}
        self.dies_at: int | None = None

    async def push(self, bucket: Bucket, version: str, others: Sequence[str] = ()) -> None:
        payload = bytes(ForkingPickler.dumps(bucket.tensors))
        try:
            self.pipe.send(b"die" if bucket.index == self.dies_at else payload)
            # the process imports torch first, on a machine that may be busy
            if not self.pipe.poll(120):
                raise EngineError(f"{self.url} gave no answer")
            self.digests.update(self.pipe.recv())
        except (EOFError, ConnectionError) as error:
            raise EngineError(f"{self.url} is gone") from error

    def stop(self) -> None:
        self.process.kill()
        self.process.join(5)


@pytest.fixture
def processes() -> Iterator[list[OtherProcess]]:
    started = [OtherProcess(f"process-{i}") for i in range(2)]
    yield started
    for process in started:
        process.stop()


def update(count: int) -> WeightUpdate:
    buckets = [
        Bucket(i, [(f"{i}.{name}", t) for name, t in named(i)], i == count - 1)
        for i in range(count)
    ]
    return WeightUpdate("0.1", buckets)


@pytest.mark.real
async def test_all_buckets_reach_all_processes_and_leave_nothing(
    processes: list[OtherProcess],
) -> None:
    before = segments()
    transport = ipc.IpcTransport(deadline=300)
    engines: list[Any] = processes
    assert await transport.connect(engines) == {}
    result = await transport.send(update(3), engines)
    assert not result.failed and result.tensors == 18
    expected = {
        name: tensor_digest(tensor)
        for bucket in update(3).buckets
        for name, tensor in bucket.tensors
    }
    assert [process.digests for process in processes] == [expected, expected]
    await transport.send(update(5), engines)
    assert all(len(process.digests) == 30 for process in processes)
    kept = segments() - before
    await transport.close()
    assert 1 <= len(kept) <= 2, "buffers are used again"
    gc.collect()
    assert segments() <= before


@pytest.mark.real
async def test_a_process_that_dies_is_named_and_the_other_gets_everything(
    processes: list[OtherProcess],
) -> None:
    before = segments()
    transport = ipc.IpcTransport(deadline=300)
    engines: list[Any] = processes
    processes[0].dies_at = 1
    await transport.connect(engines)
    result = await transport.send(update(4), engines)
    assert list(result.failed) == ["process-0"] and "gone" in str(result.failed["process-0"])
    assert len(processes[1].digests) == 24
    gc.collect()
    assert len(transport.leftovers) == 1, "the dead process never gave back what it was offered"
    await transport.close()
    assert segments() <= before


async def test_a_buffer_that_an_engine_may_still_read_is_not_used_again() -> None:
    class Slow:
        url = "slow"

        async def push(self, bucket: Bucket, version: str, others: Sequence[str] = ()) -> None:
            pushed.set()
            await asyncio.sleep(60)

    pushed = asyncio.Event()
    transport = ipc.IpcTransport(deadline=300)
    engines: list[Any] = [Slow()]
    await transport.connect(engines)
    (bucket,) = update(1).buckets
    assert transport.files is not None
    loading = asyncio.create_task(
        transport.push_staged(ipc.stage(bucket, [], transport.files), engines, update(1))
    )
    await pushed.wait()
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert not transport.spare and len(transport.leftovers) == 1
    gc.collect()
    await transport.close()


KILLED = """
import socket, sys, time, torch
from slime.weights.transports.ipc import stage
from slime.weights.transports.shared_memory import FileList
from slime.engines.payload import Bucket
files = FileList()
staged = stage(Bucket(0, [("a", torch.ones(1000))]), [], files)
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [f"{files.path} {staged.buffer.path}".encode()], [files._fd])
time.sleep(60)
"""


@pytest.mark.real
@pytest.mark.parametrize("with_manager", [False, True])
def test_a_killed_trainer_leaves_no_shared_memory(with_manager: bool) -> None:
    """Ray kills a worker's children with it, torch_shm_manager among them."""
    near, far = socket.socketpair()
    with near:
        with far:
            child = subprocess.Popen(
                [sys.executable, "-c", KILLED, str(far.fileno())], pass_fds=[far.fileno()]
            )
        message, (lock,), _, _ = socket.recv_fds(near, 4096, 1)
    listed, path = message.decode().split()
    try:
        sweep_shared_memory()
        assert os.path.exists(path), "its owner lives"
        if with_manager:
            for manager in psutil.Process(child.pid).children():
                manager.kill()
                while manager.status() != psutil.STATUS_ZOMBIE:  # its parent never asks for its end
                    time.sleep(0.01)
    finally:
        child.kill()
        child.wait(10)
    # A run in another process sweeps, too: it could remove the file before this line if the lock
    # had ended.
    assert not with_manager or os.path.exists(path)
    os.close(lock)
    if with_manager:
        sweep_shared_memory()
    deadline = time.monotonic() + 120
    while os.path.exists(path):
        assert time.monotonic() < deadline, f"{path} is still there"
        time.sleep(0.05)
    sweep_shared_memory()
    assert not os.path.exists(listed)
