"""Adapters that engines load by name from files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.engines.flat import Bucket
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
