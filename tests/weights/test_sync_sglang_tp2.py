"""Real SGLang with two tensor-parallel ranks on the CPU, fed by two training ranks."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from real_engines import VOCAB, log_probs, named_weights, new_model, save_tiny_model
from test_sync_sglang import START_SECONDS, closed_transports, sglang_args, transport_of
from torch.distributed import TCPStore

from slime.config.machine import installed
from slime.engines.background import run
from slime.engines.handle import EngineHandle
from slime.engines.launch import EngineSettings, EngineSpec, start_engine
from slime.engines.payload import NamedTensor
from slime.engines.process import EngineProcess
from slime.weights import audit
from slime.weights.audit import Probe, WeightAuditError
from slime.weights.settings import WeightSyncSettings
from slime.weights.sync import sync_weights
from slime.weights.transports.ipc import IpcTransport
from slime.weights.transports.peers import PeerLink, connect_store
from slime.weights.update import UpdateReport

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.real,
    pytest.mark.long,
    pytest.mark.skipif(not installed("sglang"), reason="needs SGLang: scripts/test_sglang.sh"),
]
__all__ = ["closed_transports"]
SECONDS = 120.0
DTYPE = "bfloat16"  # as in most runs; the harder one for the audit


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    server = start_engine(
        EngineSettings.from_args(sglang_args(model, DTYPE)),
        EngineSpec(0, str(model), num_gpus=2),
        log_path=log,
    )
    try:
        server.wait_ready(START_SECONDS)
        yield server
    finally:
        server.stop()


@pytest.fixture
def engine(server: EngineProcess) -> EngineHandle:
    return EngineHandle(server.url)


Named = Callable[[int], list[NamedTensor]]


def sync(
    engine: EngineHandle,
    model: Path,
    named: Named,
    version: str,
    audited: bool = True,
    probe: Probe | None = None,
    **more: Any,
) -> UpdateReport:
    """One update by two training ranks, a thread each; ``named`` gives what a rank sends. Then the
    probe is scored.
    """
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=SECONDS), wait_for_workers=False
    )
    settings = WeightSyncSettings.from_args(sglang_args(model, DTYPE, audit_weights=audited))
    results: list[Any] = [None, None]

    def rank_call(rank: int) -> None:
        connection = connect_store("127.0.0.1", store.port, SECONDS)
        link = PeerLink(connection, version, rank, {engine.url: range(2)}, SECONDS)
        transport = IpcTransport(SECONDS)
        mine = [engine] if rank == 0 else []
        try:
            results[rank] = sync_weights(
                settings, iter(named(rank)), mine, transport, version, rank == 0, peers=link, **more
            )
        except Exception as error:
            results[rank] = error
        finally:
            run(transport.close())

    threads = [threading.Thread(target=rank_call, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    assert isinstance(results[0], UpdateReport)
    if probe is not None:
        run(audit.probe_engines(settings, [engine], probe))
    return results[0]


def probe_of(trained: Any) -> Probe:
    tokens = audit.probe_tokens(VOCAB)
    cast = new_model(0).to(getattr(torch, DTYPE))
    cast.load_state_dict(trained.state_dict())
    return Probe(tokens, log_probs(cast, tokens))


def test_two_training_ranks_feed_the_two_ranks_of_a_server(
    engine: EngineHandle, model: Path
) -> None:
    for step in range(2):
        trained = new_model(40 + step)
        sync(engine, model, lambda _: named_weights(trained), f"1.{step}", probe=probe_of(trained))  # noqa: B023
    before = run(engine.checksum())
    sync(
        engine,
        model,
        lambda _: named_weights(trained),
        "1.2",
        probe=probe_of(trained),
        check_equal=True,
    )
    assert run(engine.checksum()) == before


def test_each_rank_of_the_server_reads_its_own_training_ranks_memory(
    engine: EngineHandle, model: Path
) -> None:
    """Training rank 1 sends other values: they are what tensor-parallel rank 1 holds, and nothing
    else changes.
    """
    trained, other = new_model(50), new_model(51)
    sync(engine, model, lambda _: named_weights(trained), "2.0")
    first = run(engine.checksum())
    sync(
        engine, model, lambda rank: named_weights(other if rank else trained), "2.1", audited=False
    )
    mixed = run(engine.checksum())
    sync(engine, model, lambda _: named_weights(other), "2.2")
    second = run(engine.checksum())
    names = [name for name in first if first[name] != second[name]]
    assert {name.split(".")[0] for name in names} == {"rank0", "rank1"}
    for name in names:
        assert mixed[name] == (second if name.startswith("rank1.") else first)[name], name


def test_the_ranks_of_a_server_share_one_copy_of_the_weights(
    engine: EngineHandle, server: EngineProcess, model: Path, tmp_path: Path
) -> None:
    """Deltas are applied once per node, to memory that both ranks have mapped."""
    args = sglang_args(model, DTYPE)
    transport, trained = transport_of("delta", args, tmp_path), new_model(70)
    settings = WeightSyncSettings.from_args(args)
    for step in range(3):
        trained.state_dict()["model.layers.0.mlp.gate_proj.weight"][3, step] += 1.0
        report = sync_weights(
            settings, iter(named_weights(trained)), [engine], transport, f"2000.{step}", True
        )
        run(audit.probe_engines(settings, [engine], probe_of(trained)))
        assert report is not None and (report.density == 1.0) == (step == 0)
    mapped: dict[str, set[int]] = {}
    for process in psutil.Process(server.child.pid).children(recursive=True):
        for file in process.memory_maps(grouped=True):
            if re.fullmatch(r"/dev/shm/torch_\d+_\d+_\d+.*", file.path):
                mapped.setdefault(file.path, set()).add(process.pid)
    assert len(mapped) == len(transport.copy.buckets), mapped  # type: ignore[attr-defined]
    assert {len(pids) for pids in mapped.values()} == {2}, mapped


NORM = "model.layers.1.post_attention_layernorm.weight"
OUT = "model.layers.0.self_attn.o_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("forgotten", "held"),
    [(NORM, NORM), (OUT, OUT), (UP, "model.layers.1.mlp.gate_up_proj.weight")],
)
def test_a_tensor_that_one_rank_of_a_server_did_not_get_ends_the_run(
    engine: EngineHandle, model: Path, forgotten: str, held: str
) -> None:
    """Training rank 1 sends another tensor of one name when the same weights are sent again."""
    attempt = 3 + len(forgotten)
    weights = dict(named_weights(new_model(attempt)))
    wrong = {**weights, forgotten: weights[forgotten] * 1.01}
    sync(engine, model, lambda _: list(weights.items()), f"{attempt}.0")
    with pytest.raises(WeightAuditError, match=f"engine {engine.url} .*rank1.{held}") as caught:
        sync(
            engine,
            model,
            lambda rank: list((wrong if rank else weights).items()),
            f"{attempt}.1",
            check_equal=True,
        )
    assert caught.value.tensors == [f"rank1.{held}"]
    sync(engine, model, lambda _: list(weights.items()), f"{attempt}.2")
