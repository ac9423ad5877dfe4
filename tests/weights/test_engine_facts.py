"""Servers of somebody else whose KV cache is partly outside them are not updated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from real_engines import sync_settings

from slime.engines.sglang_api import EngineInfo
from slime.weights.sync import sync_weights
from slime.weights.transports.disk import DiskTransport
from slime.weights.update import WeightSyncError


class Server:
    def __init__(self, url: str, **started_with: object) -> None:
        self.url, self.started_with, self.asked = url, started_with, 0

    async def info(self) -> EngineInfo:
        self.asked += 1
        return EngineInfo("sglang", "0.5.23", "/m", "default", "bfloat16", extra=self.started_with)


@pytest.mark.parametrize(
    "name", ["hicache_storage_backend", "enable_lmcache", "enable_unified_cache_external_linker"]
)
def test_such_a_server_is_named_with_its_option(tmp_path: Any, name: str) -> None:
    server: Any = Server("http://127.0.0.1:1", **{name: "file"})
    transport = DiskTransport(tmp_path, tmp_path, 5.0)
    weights = iter([("weight", torch.ones(1))])
    with pytest.raises(
        WeightSyncError, match=f"started with --{name.replace('_', '-')}.*old weights"
    ):
        sync_weights(sync_settings(), weights, [server], transport, "0.0", True)
    assert server.asked == 1 and not list(tmp_path.iterdir())
    assert list(weights) == [], "the other ranks do not wait for this one"
