"""Page-locking of a shared buffer: what is registered, and that it is unregistered while the memory
is still there.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import time
from pathlib import Path

import pytest
import torch
from test_delta import hf_folder, make, send
from test_node_copy import RANKS, Ranks

from slime.engines.payload import layout
from slime.plugins.delta import loader as delta_loader
from slime.plugins.delta.delta import HostBucket
from slime.plugins.delta.node_copy import shared_buckets
from slime.plugins.delta.published import PublishedBucket
from slime.weights.transports import shared_memory as pinning

__all__ = ["hf_folder"]
CUDA = torch.device("cuda")


class Runtime:
    """The two calls of the CUDA runtime; reads the memory that it is given."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.cleared, self.log = refuses, 0, list[str]()
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        assert flags == 0 and len(ctypes.string_at(pointer, size)) == size
        if self.refuses or pointer in self.registered:
            return 712
        self.registered[pointer] = size
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        assert self.log[-1] == "synchronize", "a copy may be under way"
        assert ctypes.string_at(pointer, self.registered.pop(pointer)), (
            "the memory must still be mapped"
        )
        self.log.append("unregister")
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(pinning, "cuda_runtime", lambda: made)
    monkeypatch.setattr(pinning, "synchronize", lambda: made.log.append("synchronize"))
    monkeypatch.setattr(pinning, "clear_error", lambda device: made.log.append("clear"))
    return made


def shared(count: int = 1000) -> HostBucket:
    entries, size = layout([("a", torch.zeros(count)), ("b", torch.zeros(3))])
    published = PublishedBucket(entries=entries, size=size, digests={}, file=None)
    ((bucket,), _) = shared_buckets([published])
    return bucket


def test_a_bucket_is_registered_as_long_as_it_lives(runtime: Runtime) -> None:
    bucket = shared()
    assert pinning.pin(bucket, CUDA)
    ((pointer, size),) = runtime.registered.items()
    first = bucket.flat.data_ptr()
    assert pointer <= first and pointer + size >= first + bucket.flat.numel()
    view = bucket.tensors()[0][1]
    del bucket
    gc.collect()
    assert runtime.registered == {} and runtime.log == ["synchronize", "unregister"]
    assert view.sum() == 0, "a view keeps the memory, which is pageable again"


def test_nothing_is_registered_without_a_gpu_or_bytes(runtime: Runtime) -> None:
    assert not pinning.pin(shared(), torch.device("cpu"))
    assert not pinning.pin(HostBucket([], torch.empty(0, dtype=torch.uint8)), CUDA)
    assert runtime.registered == {}


def test_memory_that_cuda_refuses_stays_pageable(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.refuses = True
    bucket = shared()
    with caplog.at_level(logging.WARNING):
        assert not pinning.pin(bucket, CUDA)
    assert "error 712" in caplog.text and runtime.log == ["clear"]
    del bucket
    gc.collect()
    assert runtime.log == ["clear"], "nothing to unregister"


def test_the_ranks_of_an_engine_pin_each_full_version_once(
    runtime: Runtime, hf_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[HostBucket] = []
    monkeypatch.setattr(delta_loader, "pin", lambda bucket, device: pinned.append(bucket))
    transport, engine = make(hf_folder), Ranks("a")
    assert send(transport, [engine], 0, "0.0").failed == {}
    assert len(pinned) == RANKS * len(transport.copy.buckets)
    assert len({id(bucket) for bucket in pinned}) == len(pinned), "every rank its own mapping"
    assert send(transport, [engine], 1, "0.1").failed == {}
    assert len(pinned) == RANKS * len(transport.copy.buckets), (
        "a delta changes what is pinned already"
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_from_a_pinned_bucket_are_those_of_pinned_memory() -> None:
    """Registered, equal after the copy, not slower than pageable memory, and pageable again in the
    end.
    """
    device = torch.device("cuda", 0)
    bucket = shared(64 * 2**20)
    bucket.flat.copy_(torch.randint(0, 256, bucket.flat.shape, dtype=torch.uint8))

    def seconds(bucket: HostBucket) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        copied = bucket.flat.to(device, non_blocking=True)
        torch.cuda.synchronize()
        took = time.perf_counter() - start
        assert torch.equal(copied.cpu(), bucket.flat)
        return took

    pageable = min(seconds(bucket) for _ in range(3))
    assert pinning.pin(bucket, device) and bucket.flat.is_pinned()
    print(
        f"256 MiB to the GPU: pageable {pageable:.4f} s, registered "
        f"{min(seconds(bucket) for _ in range(3)):.4f} s"
    )
    assert not pinning.pin(bucket, device), "it is registered already"
    torch.zeros(4, device=device).add_(1)  # the refusal does not surface here
    view = bucket.flat[:]
    del bucket
    gc.collect()
    assert not view.is_pinned()
