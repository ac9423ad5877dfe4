"""Ranks of one engine on one node: one host copy for all, whoever comes first, and whatever goes
wrong there.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from test_delta import Engine, Model, hf_folder, holds, make, send

from slime.engines.sglang_api import EngineInfo
from slime.plugins.delta import loader as delta_loader
from slime.plugins.delta import node_copy
from slime.plugins.delta.node_copy import Announcement, Node
from slime.plugins.delta.published import PublishedBucket
from slime.weights.transports.shared_memory import SHARED_MEMORY

__all__ = ["hf_folder"]
RANKS = 3


def segments() -> set[str]:
    return {name for name in os.listdir(SHARED_MEMORY) if name.startswith(f"torch_{os.getpid()}_")}


class Ranks(Engine):
    """An engine of several ranks, which all get each request at the same time."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.models = [Model() for _ in range(RANKS)]
        self.statuses: list[Any] = []

    async def info(self) -> EngineInfo:
        return EngineInfo("embedded", "1", "m", self.version, "float32", RANKS)

    async def call_loader(self, loader: str, request: str) -> None:
        def one(rank: int) -> Any:
            return delta_loader.load(self.models[rank], [(request, torch.empty(0))])

        with ThreadPoolExecutor(RANKS) as pool:
            self.statuses = list(pool.map(one, range(RANKS)))

    def all_hold(self, seed: int) -> bool:
        def one(model: Model) -> bool:
            self.model = model
            return holds(self, seed)

        return all(one(model) for model in self.models)


def test_one_copy_serves_all_ranks_from_version_to_version(hf_folder: Path) -> None:
    gc.collect()
    before = segments()
    transport, engine = make(hf_folder), Ranks("a")
    first = send(transport, [engine], 0, "0.0")
    assert first.failed == {} and engine.all_hold(0)
    shared = segments() - before
    assert len(shared) == len(transport.copy.buckets), "one file per bucket, not one per rank"
    for seed in (3, 4, 5):
        for model in engine.models:
            model.loaded.clear()
        result = send(transport, [engine], seed, f"0.{seed}")
        assert result.failed == {} and engine.all_hold(seed)
        assert all(len(model.loaded) in (1, 2) for model in engine.models), (
            "what changed and what changed back"
        )
    assert segments() - before == shared
    del engine.models[:], engine.model, model
    gc.collect()
    assert segments() <= before


def test_a_rank_that_lost_its_copy_heals_with_the_whole_version(hf_folder: Path) -> None:
    transport, engine = make(hf_folder), Ranks("a")
    send(transport, [engine], 0, "0.0")
    engine.models[1] = Model()
    result = send(transport, [engine], 1, "0.1")
    assert result.failed == {} and engine.all_hold(1)


def test_damage_is_told_by_all_ranks_and_healed(
    hf_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport, engine = make(hf_folder), Ranks("a")
    send(transport, [engine], 0, "0.0")
    real, outcomes = delta_loader.unpack, []

    def damaged(*arguments: Any) -> Any:
        changes = real(*arguments)
        changes.values[0] ^= 1
        return changes

    monkeypatch.setattr(delta_loader, "unpack", damaged)
    called = engine.call_loader

    async def watched(loader: str, request: str) -> None:
        await called(loader, request)
        outcomes.append({status.outcome for status in engine.statuses})

    monkeypatch.setattr(engine, "call_loader", watched)
    result = send(transport, [engine], 1, "0.1")
    assert outcomes == [{"failed"}, {"loaded"}] and result.failed == {} and engine.all_hold(1)


def test_without_room_in_shared_memory_each_rank_keeps_a_copy(
    hf_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(size: int, files: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(node_copy, "allocate", full)
    gc.collect()
    before = segments()
    transport, engine = make(hf_folder), Ranks("a")
    for step, seed in enumerate((0, 3)):
        assert send(transport, [engine], seed, f"0.{step}").failed == {} and engine.all_hold(seed)
    assert segments() <= before


def test_a_first_rank_that_dies_is_not_waited_for(tmp_path: Path) -> None:
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    )
    node = Node(str(tmp_path / "0"), 30.0)
    assert node.is_first() and not Node(str(tmp_path / "0"), 30.0).is_first()
    node.turn.write_text(gone.stdout.strip())
    with pytest.raises(RuntimeError, match="died"):
        Node(str(tmp_path / "0"), 30.0).wait()
    node.turn.write_text(str(os.getppid()))
    with pytest.raises(RuntimeError, match="within 0 s"):
        Node(str(tmp_path / "0"), 0.05).wait()
    node.announce(Announcement("ready", touched={2: ["a"]}))
    assert Node(str(tmp_path / "0"), 30.0).wait() == Announcement("ready", touched={2: ["a"]})


@pytest.mark.parametrize(
    "name", ["/../etc/hostname", "/torch_1_2_3/../x", "/psm_1", "/torch_1_2_3"]
)
def test_only_buffers_of_this_user_are_opened(name: str) -> None:
    _, ((manager, real, size),) = node_copy.shared_buckets([PublishedBucket(None, 64, [], {})])
    with pytest.raises(ValueError, match="buffer of"):
        node_copy.open_buckets(
            [PublishedBucket(None, 64, [], {})], [node_copy.Handle(manager, name, size)]
        )
    with pytest.raises(ValueError, match="buffer of"):
        node_copy.open_buckets(
            [PublishedBucket(None, size + 1, [], {})], [node_copy.Handle(manager, real, size)]
        )
