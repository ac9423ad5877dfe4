"""Adapters that engines load by name from files."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.engines.payload import AdapterPayload, AdapterRequest, Bucket
from slime.engines.sglang_api import SGLANG_0_5_15, SGLANG_0_5_23, ApiVersion, EngineError
from slime.weights.transports.adapter import AdapterTransport
from slime.weights.transports.base import OpenWindow, SendResult
from slime.weights.transports.disk import DiskTransport
from slime.weights.update import WeightUpdate


class Engine:
    """Takes the place of an engine; the real ones are in test_sync_named_adapters.py."""

    capabilities = SGLANG_0_5_15.capabilities

    def __init__(self, told: list[str], url: str = "http://127.0.0.1:1") -> None:
        self.told, self.url = told, url
        self.payloads: list[AdapterPayload] = []
        self.refuses = False

    async def adapter_request(
        self, name: str, config: Mapping[str, object], source: Path | AdapterPayload
    ) -> AdapterRequest:
        if isinstance(source, AdapterPayload):
            self.payloads.append(source)
            return AdapterRequest(name, "", b"")
        assert (source / "adapter_model.safetensors").is_file()
        return AdapterRequest(name, source.name, b"")

    async def load_adapter(self, request: AdapterRequest) -> None:
        if self.refuses:
            raise EngineError("refused")
        self.told.append(f"load {request.path}")

    async def name_version(self, version: str) -> None:
        self.told.append(version)


@pytest.mark.parametrize("keep", [False, True])
async def test_the_flags_of_files_hold_for_those_of_an_adapter(keep: bool, tmp_path: Path) -> None:
    """``--update-weight-disk-keep-files`` and ``--custom-update-weight-post-write-path``."""
    told: list[str] = []
    engine: Any = Engine(told)
    base = DiskTransport(tmp_path, tmp_path, 60.0)
    transport = AdapterTransport(
        base,
        "slime",
        {"r": 1},
        folder=tmp_path,
        shared=False,
        digests=False,
        deadline=60.0,
        keep_files=keep,
        written=lambda folder, engines: told.append(f"hook {folder.name} {len(engines)}"),
    )
    for version in ("0.1", "0.2"):
        factors = [("base_model.model.q.lora_A.weight", torch.ones(1, 4))]
        one = WeightUpdate(version, iter([Bucket(0, factors, last=True, adapter=True)]))
        assert not (await transport.send(one, [engine])).failed
    assert told == [
        "hook adapter_v0.1 1",
        "load adapter_v0.1",
        "0.1",
        "hook adapter_v0.2 1",
        "load adapter_v0.2",
        "0.2",
    ]
    await transport.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == (
        ["adapter_v0.1", "adapter_v0.2"] if keep else []
    )


@pytest.mark.parametrize("api", [SGLANG_0_5_15, SGLANG_0_5_23], ids=["0.5.15", "0.5.23"])
async def test_digests_are_computed_for_engines_that_compare_them(
    api: ApiVersion, tmp_path: Path
) -> None:
    engine: Any = Engine([])
    engine.capabilities = api.capabilities
    transport = through_memory(tmp_path, digests=True)
    assert not (await transport.send(update(1.0), [engine])).failed
    assert (engine.payloads[0].digests is not None) == api.capabilities.adapter_digests
    await transport.close()


def through_memory(folder: Path, digests: bool = False) -> AdapterTransport:
    base = DiskTransport(folder, folder, 60.0)
    return AdapterTransport(
        base, "slime", {"r": 1}, folder=None, shared=True, digests=digests, deadline=60.0
    )


def update(value: float) -> WeightUpdate:
    factors = [("base_model.model.q.lora_A.weight", torch.full((1, 4), value))]
    return WeightUpdate("0.1", iter([Bucket(0, factors, last=True, adapter=True)]))


async def test_no_memory_is_written_that_an_engine_may_read(tmp_path: Path) -> None:
    """Two versions alternate between two buffers. An engine that failed or got no more versions
    keeps its own.
    """
    one, two = Engine([], "http://127.0.0.1:1"), Engine([], "http://127.0.0.1:2")
    transport = through_memory(tmp_path)

    async def send(value: float, *engines: Any) -> None:
        await transport.send(update(value), engines)

    def values(engine: Engine) -> list[float]:
        return [payload.bucket.tensors[0][1][0, 0].item() for payload in engine.payloads]

    for version in range(1, 5):
        await send(version, one, two)
    assert values(one) == [3, 4, 3, 4], "the third version is where the first one was"
    two.refuses = True
    await send(5, one, two)
    two.refuses = False
    for version in (6, 7):  # the second engine may still read the fourth version or the fifth
        await send(version, one)
    assert values(two)[3:] == [4, 5]
    await send(8, one, two)
    before = len({payload.bucket.tensors[0][1].data_ptr() for payload in one.payloads})
    for version in range(9, 13):
        await send(version, one, two)
    assert len({payload.bucket.tensors[0][1].data_ptr() for payload in one.payloads}) == before
    assert values(one)[-2:] == values(two)[-2:] == [11, 12]
    freed = weakref.ref(one.payloads[-1].bucket.flat)
    for engine in (one, two):
        engine.payloads.clear()
    await transport.close()
    until = time.monotonic() + 10.0
    # The thread that has made the payload holds it until it runs again.
    while freed() is not None and time.monotonic() < until:
        gc.collect()
        await asyncio.sleep(0.01)
    assert freed() is None, "a closed transport holds no shared memory"


async def test_an_update_of_an_adapter_alone_is_told_to_the_window(tmp_path: Path) -> None:
    """Engines keep their KV cache then. A bucket of the base before it opens the window as for all
    weights.
    """
    asked: list[bool] = []
    engine: Any = Engine([])

    async def window(adapter_only: bool = False) -> list[Any]:
        asked.append(adapter_only)
        return [engine]

    await through_memory(tmp_path).send(update(1.0), [engine], window)
    assert asked == [True]
    factors = list(update(1.0).buckets)
    both = WeightUpdate(
        "0.2", iter([Bucket(0, [("norm.weight", torch.ones(4))]), replace(factors[0], index=1)])
    )
    base: Any = Base()
    transport = AdapterTransport(
        base, "slime", {"r": 1}, folder=None, shared=True, digests=False, deadline=60.0
    )
    await transport.send(both, [engine], window)
    assert asked == [True, False]


class Base:
    """The transport of the base, which opens the window and sends nothing."""

    name, bracketed, bucket_bytes = "base", False, 1

    async def send(self, update: WeightUpdate, engines: Any, open_window: OpenWindow) -> SendResult:
        await open_window()
        assert len(list(update.buckets)) == 1
        return SendResult()
