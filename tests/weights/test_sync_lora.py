"""Syncs of a trainer with an adapter to real embedded engines: after the first one, only the
adapter travels.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from real_engines import VOCAB, Engines, save_tiny_model, sync_args

from slime.backends.fsdp.backend import FsdpBackend
from slime.backends.train_loop import score_probe
from slime.engines.handle import EngineHandle
from slime.engines.payload import Bucket, adapter_payload, shared_memory
from slime.engines.sglang_api import EngineError
from slime.models.peft_files import named_factors
from slime.utils.async_utils import run
from slime.weights import audit
from slime.weights.audit import Probe, WeightAuditError
from slime.weights.settings import WeightSyncSettings
from slime.weights.sync import sync_weights
from slime.weights.transports import create_transport
from slime.weights.update import UpdateReport

sys.path.append(str(Path(__file__).parents[1] / "backends"))
from fsdp_helpers import make_args as backend_args

pytestmark = pytest.mark.real
LAYERS, FACTORS = 14, 28
_updated: set[str] = set()  # of one run, to which all tests here belong


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(model, tmp_path_factory.mktemp("logs"))
    yield engines
    engines.stop()


@pytest.fixture(scope="module")
def engine(fleet: Engines) -> EngineHandle:
    """The first sync of each trainer sends it everything."""
    return fleet.start(1)[0]


def trainer(model: Path, lora_sync: str, **changes: Any) -> FsdpBackend:
    flags: dict[str, Any] = dict(
        lora_rank=4, lora_alpha=8.0, use_rslora=False, lora_target_modules=["all-linear"]
    )
    args = backend_args(model, **flags, lora_sync=lora_sync, **changes)
    return FsdpBackend(args, "actor", 0, 1, torch.device("cpu"))


def train(backend: FsdpBackend, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, p in backend.adapter.trained:  # type: ignore[union-attr]
        p.data = torch.randn(p.shape, generator=generator) * 0.2


def sync(
    backend: FsdpBackend,
    model: Path,
    engine: EngineHandle,
    version: str,
    name: str = "ipc",
    gathers: Callable[[], None] = lambda: None,
) -> UpdateReport:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        gathers()
        yield from backend.named_weights()

    args = sync_args(hf_checkpoint=str(model))
    settings = WeightSyncSettings.from_args(args).for_adapter(backend.adapter_sync)
    transport = create_transport(settings, colocated_host=name == "ipc")
    assert transport.name == name
    more: dict[str, Any] = {"updated": _updated, "adapter": backend.adapter_source()}
    report = sync_weights(settings, weights(), [engine], transport, version, True, **more)
    assert report is not None
    tokens = audit.probe_tokens(VOCAB)
    gap = run(audit.probe_engines(settings, [engine], Probe(tokens, score_probe(backend, tokens))))
    assert gap < 1e-4
    run(transport.close())
    return report


@pytest.mark.parametrize("base", [None, "nf4"])
def test_only_the_adapter_travels(model: Path, engine: EngineHandle, base: str | None) -> None:
    """Also to an engine that has the rounded weights of a base in 4 bits."""
    if base is not None:
        pytest.importorskip("torchao", reason="pip install 'slime-rl[torchao]'")
    backend = trainer(model, "adapter", lora_base_quantization=base)
    weights = {name for name, _ in backend.named_weights()}
    gathered: list[str] = []
    first = sync(backend, model, engine, "0.0", gathers=lambda: gathered.append("0.0"))
    assert first.tensors == len(weights) and len(first.digests) == len(weights)
    for step, name in ((1, "ipc"), (2, "distributed")):
        train(backend, step)
        report = sync(backend, model, engine, f"0.{step}", name, lambda: gathered.append("later"))
        assert report.tensors == FACTORS and gathered == ["0.0"], "the base is not gathered again"
        assert report.nbytes == 4 * sum(p.numel() for _, p in backend.adapter.trained)  # type: ignore[union-attr]
        assert set(report.digests) == backend.adapter_sync.changing  # type: ignore[union-attr]
        assert run(engine.info()).weight_version == f"0.{step}"
    held = run(engine.checksum())
    assert set(held) == weights and all(
        held[name] == first.digests[name] for name in held if ".lora_" not in name
    )
    # Another attempt sends everything, to an engine that has other factors.
    train(backend, 9)
    assert sync(backend, model, engine, "1.0").tensors == len(weights)


def test_an_engine_with_another_factor_is_found(
    model: Path, engine: EngineHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = trainer(model, "adapter")
    sync(backend, model, engine, "0.0")
    train(backend, 1)
    push = EngineHandle.push

    async def damaged(self: EngineHandle, bucket: Any, *more: Any) -> None:
        bucket.tensors[0][1].view(-1)[0] += 0.5
        await push(self, bucket, *more)

    monkeypatch.setattr(EngineHandle, "push", damaged)
    with pytest.raises(WeightAuditError, match=r"lora_A\.weight"):
        sync(backend, model, engine, "0.1")


def test_merged_weights_of_its_layers_travel(model: Path, fleet: Engines) -> None:
    """To an engine that has never had an adapter."""
    (engine,) = fleet.start(1)
    backend = trainer(model, "merged")
    whole = sync(backend, model, engine, "0.0").tensors
    assert whole == len(list(backend.named_weights()))
    train(backend, 1)
    report = sync(backend, model, engine, "0.1")
    assert report.tensors == LAYERS < whole
    assert set(report.digests) == {f"{name}.weight" for name in backend.adapter.layers}  # type: ignore[union-attr]


@pytest.mark.long
def test_an_older_version_and_another_runs_adapter_are_chosen_by_name(
    model: Path, engine: EngineHandle, tmp_path: Path
) -> None:
    mine, other = trainer(model, "adapter"), trainer(model, "adapter")
    tokens = audit.probe_tokens(VOCAB)
    train(mine, 1)
    older = score_probe(mine, tokens)
    assert (
        mine.adapter is not None
        and mine.adapter_sync is not None
        and mine.adapter_sync.config is not None
    )
    factors = {
        name: p.detach().clone() for name, p in named_factors(mine.adapter.factors()).items()
    }
    train(other, 2)
    other.save_hf(str(tmp_path))
    train(mine, 3)
    sync(mine, model, engine, "0.1")
    payload = adapter_payload(Bucket(0, list(factors.items())), digests=False, memory=shared_memory)
    for name, source in {"older": payload, "other": tmp_path}.items():
        run(
            engine.load_adapter(run(engine.adapter_request(name, mine.adapter_sync.config, source)))
        )
    expected = {
        None: score_probe(mine, tokens),
        "older": older,
        "other": score_probe(other, tokens),
    }
    for name, ours in expected.items():
        theirs = run(audit.score(engine, tokens, name))
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4, name
    assert run(engine.info()).weight_version == "0.1"

    async def while_a_request_uses_it() -> None:
        params = {"max_new_tokens": 2000, "ignore_eos": True}
        body = {"input_ids": tokens, "sampling_params": params, "lora_path": "older"}
        request = asyncio.ensure_future(engine.generate(body))
        while not (await engine.load())["running"]:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match=r"1 requests.*'older'"):
            await engine.unload_adapter("older")
        await engine.abort()
        await request

    run(while_a_request_uses_it())
    run(engine.unload_adapter("older"))
    with pytest.raises(EngineError, match=r"'older'.*loaded.*other"):
        run(audit.score(engine, tokens, "older"))
