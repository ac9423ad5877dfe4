"""Syncs of a trainer with an adapter to real SGLang and real vLLM on the CPU, which load each version
under one name.

In the stages of scripts/test_sglang.sh and scripts/test_vllm.sh. One server for the whole module.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from real_engines import VOCAB, save_tiny_model, sync_args

from slime.backends.fsdp.backend import FsdpBackend
from slime.backends.train_loop import score_probe
from slime.config.lora import ADAPTER_NAME
from slime.config.machine import installed
from slime.engines.handle import EngineHandle
from slime.engines.launch import EngineSettings, EngineSpec, start_engine
from slime.engines.payload import Bucket, adapter_payload, shared_memory
from slime.engines.sglang_api import EngineError
from slime.utils.async_utils import run
from slime.weights import audit
from slime.weights.audit import Probe, WeightAuditError
from slime.weights.settings import WeightSyncSettings
from slime.weights.sync import sync_weights
from slime.weights.transports import create_transport
from slime.weights.update import UpdateReport, WeightSyncError

sys.path.append(str(Path(__file__).parents[1] / "backends"))
from fsdp_helpers import make_args as backend_args

pytestmark = [pytest.mark.real, pytest.mark.long]
KINDS = [
    pytest.param(
        kind,
        marks=[
            getattr(pytest.mark, kind),
            pytest.mark.skipif(not installed(kind), reason=f"needs scripts/test_{kind}.sh"),
        ],
    )
    for kind in ("sglang", "vllm")
]
of_sglang = pytest.mark.parametrize("kind", KINDS[:1], indirect=True)
of_vllm = pytest.mark.parametrize("kind", KINDS[1:], indirect=True)
START_SECONDS = 400.0
RANK, FACTORS = 4, 28
_updated: set[str] = set()  # of one run, to which all tests here belong
LONG = 3000  # tokens of a request that is still under way when the weights change
LORA: dict[str, Any] = dict(
    lora_rank=RANK, lora_alpha=8.0, lora_target_modules=["all-linear"], lora_sync="adapter"
)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, kind: str) -> Path:
    # the heads that vLLM's kernels for a CPU know have 32 numbers or more
    shape = {"head_dim": 32} if kind == "vllm" else {}
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), **shape)


@pytest.fixture(scope="module")
def engine(
    model: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> Iterator[EngineHandle]:
    settings = EngineSettings.from_args(engine_args(model, kind))
    log = tmp_path_factory.mktemp("logs") / "server.log"
    temporary = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        server = start_engine(settings, EngineSpec(0, str(model)), log_path=log)
    try:
        server.wait_ready(START_SECONDS)
        yield EngineHandle(server.url)
    finally:
        server.stop()
    assert not list(temporary.glob("slime-adapter-*"))


def engine_args(model: Path, kind: str, **changes: Any) -> Any:
    settings: dict[str, Any] = dict(
        rollout_backend=kind,
        hf_checkpoint=str(model),
        rollout_dtype="float32",
        sglang={"device": "cpu", "max_total_tokens": 4096},
        vllm={"kv_cache_memory_bytes": 2**26, "block_size": 32, "max_loras": 2},
        threads_per_process=1,
    )
    return sync_args(**(settings | LORA | changes))


def trainer(model: Path, seed: int, **changes: Any) -> FsdpBackend:
    """A trainer whose factors are random, so that the adapter changes what the model computes."""
    args = backend_args(model, **({"use_rslora": False} | LORA | changes))
    backend = FsdpBackend(args, "actor", 0, 1, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for _, p in backend.adapter.trained:  # type: ignore[union-attr]
        p.data = torch.randn(p.shape, generator=generator) * 0.2
    return backend


def probe_of(backend: FsdpBackend) -> Probe:
    tokens = audit.probe_tokens(VOCAB)
    return Probe(tokens, score_probe(backend, tokens))


def sync(
    backend: FsdpBackend,
    model: Path,
    engine: EngineHandle,
    version: str,
    same_host: bool = True,
    **changes: Any,
) -> UpdateReport:
    args = engine_args(model, run(engine.connect()).kind, **changes)
    settings = WeightSyncSettings.from_args(args).for_adapter(backend.adapter_sync)
    transport = create_transport(settings, colocated_host=same_host)
    try:
        more: dict[str, Any] = {"updated": _updated, "adapter": backend.adapter_source()}
        report = sync_weights(
            settings, backend.named_weights(), [engine], transport, version, True, **more
        )
        assert report is not None
        assert run(audit.probe_engines(settings, [engine], probe_of(backend))) < 1e-4
    finally:
        run(transport.close())
    return report


def gap(engine: EngineHandle, probe: Probe, adapter: str | None) -> float:
    """The largest difference of a log-prob of the engine from the probe."""
    return run(audit.check_probe([engine], probe, float("inf"), 60, adapter))[engine.url]


def test_only_the_adapter_travels(
    model: Path, engine: EngineHandle, kind: str, tmp_path: Path
) -> None:
    """From the second update on, through shared memory, in the request (SGLang), and in files."""
    backend = trainer(model, 0)
    whole = len(list(backend.named_weights()))
    base = run(engine.checksum())
    assert sync(backend, model, engine, "0.0").tensors == whole
    folder = {"update_weight_transport": "disk", "update_weight_disk_dir": str(tmp_path)}
    ways = ((True, {}), (True, folder), *([(False, {})] if kind == "sglang" else ()))
    for step, (same_host, flags) in enumerate(ways, start=1):
        backend = trainer(model, step)
        report = sync(backend, model, engine, f"0.{step}", same_host, **flags)
        assert report.tensors == FACTORS
        assert report.nbytes == 4 * sum(p.numel() for _, p in backend.adapter.trained)  # type: ignore[union-attr]
        assert run(engine.info()).weight_version == f"0.{step}"
    # the files of the last version are removed with the transport
    assert not list(tmp_path.glob("[!.]*"))
    assert run(engine.checksum()) == base
    # Without a name, the base answers, as with the adapter off.
    with backend.adapter.using("ref", backend.bank):  # type: ignore[union-attr]
        off = probe_of(backend)
    assert gap(engine, off, None) < 1e-4 < 0.1 < gap(engine, off, ADAPTER_NAME)
    if kind == "vllm":
        with pytest.raises(WeightSyncError, match="another host"):
            sync(backend, model, engine, "0.3", same_host=False)


def test_the_factor_of_rslora_is_kept(model: Path, engine: EngineHandle) -> None:
    sync(trainer(model, 4, use_rslora=True), model, engine, "1.0", use_rslora=True)


def test_requests_under_way_go_on_with_the_new_version(model: Path, engine: EngineHandle) -> None:
    """A sync ends them with the tokens so far, which their clients send again; the log-probs of
    each part are those of the version that it names."""
    old, new = trainer(model, 5), trainer(model, 6)
    sync(old, model, engine, "2.0")
    prompt = audit.probe_tokens(VOCAB)[:8]

    def body(tokens: list[int], length: int) -> dict[str, Any]:
        params = {"max_new_tokens": length, "temperature": 1.0, "ignore_eos": True}
        return {
            "input_ids": tokens,
            "sampling_params": params,
            "return_logprob": True,
            "lora_path": ADAPTER_NAME,
        }

    async def under_way() -> asyncio.Task[Any]:
        task = asyncio.ensure_future(engine.generate(body(prompt, LONG)))
        while not (await engine.load())["running"]:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        return task

    async def finished(task: asyncio.Task[Any]) -> Any:
        return await task

    request = run(under_way())
    sync(new, model, engine, "2.1")
    first = run(finished(request))
    made = [entry[1] for entry in first["meta_info"]["output_token_logprobs"]]
    assert 0 < len(made) < LONG and first["meta_info"]["finish_reason"]["type"] == "abort"
    second = run(engine.generate(body([*prompt, *made], 50)))
    rest = [entry[1] for entry in second["meta_info"]["output_token_logprobs"]]
    for backend, answer, before in ((old, first, prompt), (new, second, [*prompt, *made])):
        part = made if answer is first else rest
        ours = score_probe(backend, [*before, *part])[len(before) - 1 :]
        theirs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4


def test_a_sync_of_an_adapter_leaves_the_cache_of_the_base(
    model: Path, engine: EngineHandle
) -> None:
    """The cache is not flushed then, and no request with the new version uses what the old one left
    in it.
    """
    old, new = trainer(model, 14), trainer(model, 15)
    sync(old, model, engine, "2.5")
    # the audits of the syncs have put the probe itself into the cache
    prompt = audit.probe_tokens(VOCAB)[::-1]

    def cached(name: str | None) -> tuple[int, list[float]]:
        body: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True},
        }
        body |= {"return_logprob": True} | ({} if name is None else {"lora_path": name})
        told = run(engine.generate(body))["meta_info"]
        return told["cached_tokens"], [entry[0] for entry in told["output_token_logprobs"]]

    for name in (None, ADAPTER_NAME):
        cached(name)
        assert cached(name)[0] > 0, name
    before = cached(ADAPTER_NAME)[1]
    sync(new, model, engine, "2.6")
    tokens, after = cached(ADAPTER_NAME)
    assert tokens == 0 and max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-3
    assert cached(None)[0] > 0


def test_several_adapters_are_chosen_by_name(
    model: Path, engine: EngineHandle, tmp_path: Path
) -> None:
    """The run's own and one of another run, from its files, in one batch."""
    mine, other = trainer(model, 7), trainer(model, 8)
    other.save_hf(str(tmp_path / "other"))
    sync(mine, model, engine, "3.0")
    assert mine.adapter is not None
    run(
        engine.load_adapter(
            run(engine.adapter_request("other", mine.adapter.config([]), tmp_path / "other"))
        )
    )
    names = {ADAPTER_NAME: mine, "other": other}

    async def both() -> list[list[float]]:
        tokens = audit.probe_tokens(VOCAB)
        return await asyncio.gather(*(audit.score(engine, tokens, name) for name in names))

    for values, backend in zip(run(both()), names.values(), strict=True):
        assert (
            max(abs(a - b) for a, b in zip(values, probe_of(backend).log_probs, strict=True)) < 1e-4
        )
    run(engine.unload_adapter("other"))
    run(engine.unload_adapter("other"))  # there is none any more
    with pytest.raises(EngineError, match="nobody"):
        gap(engine, probe_of(mine), "nobody")


def test_the_audit_finds_another_adapter(model: Path, engine: EngineHandle) -> None:
    backend = trainer(model, 9)
    sync(backend, model, engine, "4.0")
    with pytest.raises(WeightAuditError, match="disagree on the probe"):
        run(audit.check_probe([engine], probe_of(trainer(model, 10)), 1e-3, 60, ADAPTER_NAME))


async def from_memory(engine: EngineHandle, name: str, backend: FsdpBackend) -> None:
    source = backend.adapter_source()
    assert source is not None and backend.adapter_sync is not None
    bucket = Bucket(0, list(source.factors), last=True, adapter=True)
    payload = adapter_payload(bucket, digests=False, memory=shared_memory)
    config = backend.adapter_sync.config
    assert config is not None
    await engine.load_adapter(await engine.adapter_request(name, config, payload))


@of_vllm
def test_more_adapters_than_there_is_room_for(model: Path, engine: EngineHandle) -> None:
    """vLLM reads one again that it has dropped. One of them has not all projections of a layer."""
    some = {"lora_target_modules": ["q_proj", "down_proj"]}
    trained = {f"number-{i}": trainer(model, 20 + i, **(some if i else {})) for i in range(4)}
    for name, backend in trained.items():
        run(from_memory(engine, name, backend))
    for name, backend in trained.items():
        assert gap(engine, probe_of(backend), name) < 1e-4
    for name in trained:
        run(engine.unload_adapter(name))


@of_vllm
def test_requests_of_an_adapter_that_is_replaced(model: Path, engine: EngineHandle) -> None:
    """Those under way end with the tokens so far; those that come in a pause wait for the new one."""
    run(from_memory(engine, "mine", trainer(model, 30)))
    new = trainer(model, 31)
    tokens = audit.probe_tokens(VOCAB)

    async def replaced() -> tuple[dict[str, Any], list[float]]:
        params = {"max_new_tokens": LONG, "ignore_eos": True}
        body = {"input_ids": tokens[:8], "sampling_params": params, "lora_path": "mine"}
        first = asyncio.ensure_future(engine.generate(body))
        while not (await engine.load())["running"]:
            await asyncio.sleep(0.05)
        await engine.pause("in_place")
        second = asyncio.ensure_future(audit.score(engine, tokens, "mine"))
        await asyncio.sleep(0.5)
        await from_memory(engine, "mine", new)
        await engine.continue_generation()
        return await first, await second

    first, second = run(replaced())
    assert first["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < first["meta_info"]["completion_tokens"] < LONG
    assert max(abs(a - b) for a, b in zip(second, probe_of(new).log_probs, strict=True)) < 1e-4
    run(engine.unload_adapter("mine"))


@of_sglang
def test_an_adapter_of_another_rank_is_refused_in_sglangs_words(
    model: Path, engine: EngineHandle
) -> None:
    backend = trainer(model, 11, lora_rank=8)
    with pytest.raises(WeightSyncError, match="rank 8"):
        sync(backend, model, engine, "5.0", lora_rank=8)
    sync(trainer(model, 12), model, engine, "5.1")  # the next one heals the engine


@of_sglang
def test_damaged_factors_are_found_before_they_are_loaded(
    model: Path, engine: EngineHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is the last test with SGLang: its check of the digests ends its server."""
    from slime.engines.payload import AdapterPayload

    whole = AdapterPayload.body

    def damaged(self: AdapterPayload, *more: Any, **options: Any) -> dict[str, object]:
        self.bucket.tensors[3][1].view(-1)[0] += 0.5
        return whole(self, *more, **options)

    monkeypatch.setattr(AdapterPayload, "body", damaged)
    started = time.monotonic()
    with pytest.raises(WeightSyncError):
        sync(trainer(model, 13), model, engine, "6.0")
    # the connection ends with the server; no deadline is waited for
    assert time.monotonic() - started < 60
