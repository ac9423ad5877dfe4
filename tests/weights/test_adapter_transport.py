"""Adapters that engines load by name from files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.engines.adapter_payload import AdapterPayload, adapter_payload
from slime.engines.flat import Bucket
from slime.engines.sglang_api import SGLANG_0_5_15, SGLANG_0_5_23, ApiVersion
from slime.weights.transports.adapter import AdapterTransport
from slime.weights.transports.disk import DiskTransport
from slime.weights.update import WeightUpdate


class Engine:
    """Takes the place of an engine; the real ones are in test_sync_sglang_lora.py."""

    url = "http://127.0.0.1:1"

    def __init__(self, told: list[str]) -> None:
        self.told = told

    async def load_adapter(self, name: str, config: Mapping[str, object], source: Path) -> None:
        assert (source / "adapter_model.safetensors").is_file()
        self.told.append(f"load {source.name}")

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
        update = WeightUpdate(version, iter([Bucket(0, factors, last=True, adapter=True)]))
        assert not (await transport.send(update, [engine])).failed
    assert told == [
        "hook adapter_v0.1 1",
        "load adapter_v0.1",
        "0.1",
        "hook adapter_v0.2 1",
        "load adapter_v0.2",
        "0.2",
    ]
    await transport.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == (["adapter_v0.1", "adapter_v0.2"] if keep else [])


def test_factors_are_in_shared_memory_before_they_are_encoded() -> None:
    """Encoding them happens while engines are paused, and must not copy them."""
    factors = [(f"layer.{i}.lora_A.weight", torch.full((3, 5), float(i))) for i in range(4)]
    payload = adapter_payload(Bucket(0, factors), shared=True, digests=False)
    flat = payload.bucket.flat
    assert flat is not None and flat.is_shared()
    place = flat.data_ptr()
    payload.body(1, newest=False)
    assert flat.data_ptr() == place
    for (name, own), (given, tensor) in zip(payload.bucket.tensors, factors, strict=True):
        assert name == given and torch.equal(own, tensor)


@pytest.mark.parametrize("api", [SGLANG_0_5_15, SGLANG_0_5_23], ids=["0.5.15", "0.5.23"])
async def test_digests_are_computed_for_engines_that_compare_them(api: ApiVersion, tmp_path: Path) -> None:
    got: list[AdapterPayload] = []

    class Taker(Engine):
        capabilities = api.capabilities

        async def load_adapter(self, name: str, config: Mapping[str, object], source: object) -> None:
            assert isinstance(source, AdapterPayload)
            got.append(source)

    engine: Any = Taker([])
    base = DiskTransport(tmp_path, tmp_path, 60.0)
    transport = AdapterTransport(base, "slime", {"r": 1}, folder=None, shared=True, digests=True, deadline=60.0)
    factors = [("base_model.model.q.lora_A.weight", torch.ones(1, 4))]
    update = WeightUpdate("0.1", iter([Bucket(0, factors, last=True, adapter=True)]))
    assert not (await transport.send(update, [engine])).failed
    assert (got[0].digests is not None) == api.capabilities.adapter_digests
    await transport.close()
