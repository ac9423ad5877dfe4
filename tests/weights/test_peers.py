"""Engines that span several training ranks: each tensor-parallel rank opens the handle of the rank
on its own GPU.
"""

from __future__ import annotations

import base64
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real_engines import sync_settings
from torch.distributed import TCPStore

from slime.engines.payload import NamedTensor, payload
from slime.engines.sglang_api import Capabilities, EngineError, EngineInfo
from slime.weights.sync import sync_weights
from slime.weights.transports import ipc
from slime.weights.transports.peers import PeerError, PeerLink, connect_store
from slime.weights.transports.shared_memory import SHARED_MEMORY
from slime.weights.update import UpdateReport, WeightSyncError

SECONDS = 60.0
SIZES = (700, 300, 900, 20, 1000)  # floats: three buckets of at most 4096 bytes


def weights(rank: int) -> list[NamedTensor]:
    """Tensors that say which training rank's memory they are in."""
    return [(f"layer.{i}", torch.full((size,), float(rank))) for i, size in enumerate(SIZES)]


class Engine:
    """Opens every entry as the tensor-parallel rank of its place would, and keeps what is in it."""

    def __init__(self, url: str, ranks: int, dies_at: int | None = None) -> None:
        self.url, self.ranks, self.dies_at = url, ranks, dies_at
        self.capabilities = Capabilities()
        self.held: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
        self.pushed = 0

    async def info(self) -> EngineInfo:
        return EngineInfo("sglang", "0", "", "default", "float32", self.ranks)

    async def load(self) -> dict[str, int]:
        return {"running": 0, "waiting": 0}

    async def push(self, bucket: Any, version: str, others: Sequence[str] = ()) -> None:
        entries = payload(bucket, self.ranks, others)["serialized_named_tensors"]
        if self.pushed == self.dies_at:
            raise EngineError(f"{self.url} is gone")
        self.pushed += 1
        for held, entry in zip(self.held, entries, strict=True):
            value = pickle.loads(base64.b64decode(entry))
            for meta in value["metadata"]:
                part = value["flattened_tensor"][meta.start_idx : meta.end_idx]
                held[meta.name] = part.view(meta.dtype).view(meta.shape).clone()

    def __getattr__(self, name: str) -> Any:
        async def call(*_: Any, **__: Any) -> None:
            if name not in (
                "pause",
                "flush_cache",
                "begin_update",
                "end_update",
                "continue_generation",
            ):
                raise AttributeError(name)

        return call


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore(
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=SECONDS), wait_for_workers=False
    )


def update(
    store: TCPStore,
    engines: Sequence[Engine],
    world_size: int,
    places: dict[str, range],
    named: Callable[[int], Any] = weights,
    **flags: Any,
) -> list[Any]:
    """One update on all ranks, a thread each; returns what each rank's call returned or raised."""
    results: list[Any] = [None] * world_size
    settings = sync_settings(audit_weights=False, **flags)

    def rank_call(rank: int) -> None:
        link = PeerLink(
            connect_store("127.0.0.1", store.port, SECONDS), "update", rank, places, SECONDS
        )
        mine: list[Any] = [engine for engine in engines if places[engine.url][0] == rank]
        transport = ipc.IpcTransport(SECONDS)
        try:
            results[rank] = sync_weights(
                settings, iter(named(rank)), mine, transport, "0.1", bool(mine), peers=link
            )
        except Exception as error:
            results[rank] = error
        finally:
            from slime.engines.background import run

            run(transport.close())

    threads = [threading.Thread(target=rank_call, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SECONDS)
        assert not thread.is_alive()
    return results


def segments() -> set[str]:
    return {name for name in os.listdir(SHARED_MEMORY) if name.startswith(f"torch_{os.getpid()}_")}


def assert_holds(engine: Engine, places: range) -> None:
    for rank, held in zip(places, engine.held, strict=True):
        assert list(held) == [name for name, _ in weights(0)]
        assert all(torch.equal(held[name], tensor) for name, tensor in weights(rank)), (
            f"rank {rank}"
        )


def test_each_rank_of_the_engines_reads_its_own_training_ranks_memory(store: TCPStore) -> None:
    before = segments()
    engines = [Engine("a", 2), Engine("b", 1), Engine("c", 3)]
    places = {"a": range(0, 2), "b": range(2, 3), "c": range(3, 6)}
    results = update(store, engines, 6, places)
    assert [isinstance(result, UpdateReport) for result in results] == [
        True,
        False,
        True,
        True,
        False,
        False,
    ], results
    for engine in engines:
        assert_holds(engine, places[engine.url])
        assert engine.pushed == 3
    assert segments() <= before
    assert store.num_keys() <= 1, "nothing of the update stays in the store"


def test_engines_of_one_sender_each_get_a_handle_of_their_own(store: TCPStore) -> None:
    engines = [Engine("a", 2), Engine("b", 2)]
    update(store, engines, 2, {"a": range(0, 2), "b": range(0, 2)})
    for engine in engines:
        assert_holds(engine, range(0, 2))


def test_the_dtype_that_the_engines_hold_is_the_peers_too(store: TCPStore) -> None:
    engine = Engine("a", 2)

    async def info() -> EngineInfo:
        return EngineInfo("sglang", "0", "", "default", "bfloat16", 2)

    engine.info = info  # type: ignore[method-assign]
    update(store, [engine], 2, {"a": range(0, 2)})
    assert [held["layer.3"].dtype for held in engine.held] == [torch.bfloat16] * 2


def test_an_engine_that_dies_is_named_and_the_others_get_everything(store: TCPStore) -> None:
    engines = [Engine("a", 2, dies_at=1), Engine("b", 2)]
    places = {"a": range(0, 2), "b": range(0, 2)}
    results = update(store, engines, 2, places)
    assert isinstance(results[0], WeightSyncError) and list(results[0].failed) == ["a"], results
    assert results[1] is None
    assert_holds(engines[1], range(0, 2))


@pytest.mark.parametrize("dies_at", [0, 2])
def test_the_last_engine_that_dies_ends_the_update_on_all_ranks(
    store: TCPStore, dies_at: int
) -> None:
    results = update(store, [Engine("a", 3, dies_at)], 3, {"a": range(0, 3)})
    assert isinstance(results[0], WeightSyncError), results
    assert results[1:] == [None, None]


def test_a_peer_that_fails_ends_the_update_with_its_reason(store: TCPStore) -> None:
    def named(rank: int) -> Iterator[NamedTensor]:
        for name, tensor in weights(rank):
            if rank == 1 and name == "layer.2":
                raise ArithmeticError("out of everything")
            yield name, tensor

    results = update(store, [Engine("a", 2)], 2, {"a": range(0, 2)}, named)
    assert isinstance(results[1], ArithmeticError)
    assert isinstance(results[0], PeerError) and "rank 1" in str(results[0]), results
    assert "out of everything" in str(results[0])


def test_a_peer_with_other_tensors_is_refused(store: TCPStore) -> None:
    def named(rank: int) -> list[NamedTensor]:
        return weights(rank) if rank == 0 else list(reversed(weights(rank)))

    results = update(store, [Engine("a", 2)], 2, {"a": range(0, 2)}, named)
    assert isinstance(results[0], PeerError) and "bucket 0" in str(results[0]), results


def test_a_sender_that_fails_before_it_begins_frees_its_peers(store: TCPStore) -> None:
    engine = Engine("a", 2)

    async def info() -> EngineInfo:
        raise EngineError("a does not answer")

    engine.info = info  # type: ignore[method-assign]
    drained: list[int] = []

    def named(rank: int) -> Iterator[NamedTensor]:
        yield from weights(rank)
        drained.append(rank)

    results = update(store, [engine], 2, {"a": range(0, 2)}, named)
    assert isinstance(results[0], WeightSyncError) and results[1] is None, results
    assert sorted(drained) == [0, 1], "gathering is a collective: every rank takes part to its end"


def test_a_payload_has_one_entry_for_each_rank_of_the_engine() -> None:
    bucket: Any = SimpleNamespace(index=0, tensors=weights(0)[:1], last=True, flat=None)
    assert len(payload(bucket, 3)["serialized_named_tensors"]) == 3
    assert payload(bucket, 3, ["b", "c"])["serialized_named_tensors"][1:] == ["b", "c"]
    with pytest.raises(ValueError, match=r"2 training.*of 3"):
        payload(bucket, 3, ["b"])
