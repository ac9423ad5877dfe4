"""Syncs of quantized weights to a real embedded engine: its log-probs are those of the quantized
weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from real_engines import VOCAB, log_probs, named_weights, new_model, save_tiny_model, sync_args

from slime.config.args import Args
from slime.engines.handle import EngineHandle
from slime.engines.launch import EngineSettings, EngineSpec, start_engine
from slime.engines.process import EngineProcess
from slime.models.fp8 import dequantize, quantize
from slime.models.fp8_format import layout_of
from slime.utils.async_utils import run
from slime.weights import audit
from slime.weights.audit import Probe, WeightAuditError
from slime.weights.settings import WeightSyncSettings
from slime.weights.sync import sync_weights
from slime.weights.transports import create_transport
from slime.weights.update import UpdateReport

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def flags(model: Path, **more: Any) -> Args:
    defaults: dict[str, Any] = dict(
        hf_checkpoint=str(model), rollout_quantization="fp8", rollout_dtype="float32", embedded_device="cpu",
        embedded_max_running_requests=8, embedded_max_total_tokens=8192, threads_per_process=1,
    )  # fmt: skip
    return sync_args(**(defaults | more))


@pytest.fixture(scope="module")
def process(
    model: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    started = start_engine(
        EngineSettings.from_args(flags(model)), EngineSpec(0, str(model)), log_path=log
    )
    started.wait_ready(120)
    yield started
    started.stop()


def rounded(trained: Any, model: Path, args: Args) -> Any:
    """A copy of the model with the weights that an engine has after a sync."""
    settings = WeightSyncSettings.from_args(args)
    assert settings.fp8 is not None
    layout, other = layout_of(str(model), settings.fp8), copy.deepcopy(trained)
    for name, tensor in named_weights(other):
        if name in layout.names:
            tensor.copy_(dequantize(*quantize(tensor, layout.format.granularity)))
    return other


def sync(
    args: Args, trained: Any, process: EngineProcess, version: str, folder: Path, name: str = "ipc"
) -> tuple[UpdateReport, float]:
    """Returns the report and the gap of the probe to the weights before they are quantized."""
    args = args.with_values(
        update_weight_disk_dir=str(folder),
        update_weight_transport="disk" if name == "disk" else "nccl",
    )
    settings, engine = WeightSyncSettings.from_args(args), EngineHandle(process.url)
    transport = create_transport(settings, colocated_host=name == "ipc")
    assert transport.name == name
    report = sync_weights(
        settings, iter(named_weights(trained)), [engine], transport, version, True
    )
    assert report is not None
    tokens = audit.probe_tokens(VOCAB)
    gap = run(audit.probe_engines(settings, [engine], Probe(tokens, log_probs(trained, tokens))))
    run(transport.close())
    return report, gap


def test_an_engine_starts_with_quantized_weights(
    process: EngineProcess, model: Path, cache: Path
) -> None:
    engine, tokens = EngineHandle(process.url), audit.probe_tokens(VOCAB)
    assert Path(run(engine.info()).model_path).parent == cache / "slime" / "fp8"
    got = run(audit.score(engine, tokens))
    assert got == pytest.approx(
        log_probs(rounded(new_model(0), model, flags(model)), tokens), abs=1e-4
    )
    assert got != pytest.approx(log_probs(new_model(0), tokens), abs=1e-3)


@pytest.mark.parametrize("name", ["ipc", "distributed", "disk"])
@pytest.mark.parametrize("granularity", ["block", "channel", "tensor"])
def test_the_log_probs_are_those_of_the_quantized_weights(
    name: str, granularity: str, process: EngineProcess, model: Path, tmp_path: Path
) -> None:
    args = flags(model, rollout_quantization_scale=granularity)
    trained = new_model(["ipc", "distributed", "disk"].index(name) + 20)
    report, gap = sync(args, trained, process, "0.1", tmp_path, name)
    engine, tokens = EngineHandle(process.url), audit.probe_tokens(VOCAB)
    expected = log_probs(rounded(trained, model, args), tokens)
    assert run(audit.score(engine, tokens)) == pytest.approx(expected, abs=1e-4)
    assert gap == pytest.approx(
        max(abs(a - b) for a, b in zip(expected, log_probs(trained, tokens), strict=True)), abs=1e-4
    )
    whole = sum(t.numel() * t.element_size() for _, t in named_weights(trained))
    assert report.nbytes < 0.5 * whole, "of float32, with embeddings that are not quantized"
    assert report.tensors == len(named_weights(trained)) + 14
    assert report.digests.keys() == dict(named_weights(trained)).keys() and report.audit_seconds > 0
    assert run(engine.info()).weight_version == "0.1"


def test_an_engine_with_other_values_is_found(
    process: EngineProcess, model: Path, tmp_path: Path
) -> None:
    """The digests are those of the weights that the engine computes with."""
    args, trained = flags(model), new_model(30)
    sync(args, trained, process, "0.1", tmp_path)
    engine = EngineHandle(process.url)
    sums = run(engine.checksum())
    report, _ = sync(args, trained, process, "0.2", tmp_path)
    audit.check_digests(process.url, report.digests, sums)
    with pytest.raises(WeightAuditError, match=r"14 of 20 tensors"):
        plain = sync_weights(
            replace(WeightSyncSettings.from_args(args), fp8=None),
            iter(named_weights(trained)),
            [engine],
            create_transport(WeightSyncSettings.from_args(args), colocated_host=True),
            "0.3",
            True,
        )
        assert plain is not None
        audit.check_digests(process.url, plain.digests, sums)


def test_values_without_scales_are_refused(process: EngineProcess) -> None:
    from slime.plugins.embedded.served import WeightError
    from slime.plugins.embedded.weights import Weights

    weights = Weights(new_model(0))
    name = "model.layers.0.mlp.up_proj.weight"
    values, scales = quantize(weights.views[name], "block")
    with pytest.raises(WeightError, match="scales"):
        weights.load([(name, values)])
    with pytest.raises(WeightError, match=r"shape \(3, 3"):
        weights.load([(f"{name}_scale_inv", torch.ones(3, 3)), (name, values)])
    with pytest.raises(WeightError, match=r"no tensor 'model\.layers\.9\.mlp\.up_proj\.weight'"):
        weights.load([("model.layers.9.mlp.up_proj.weight_scale_inv", scales)])
    assert weights.load([(f"{name}_scale_inv", scales)]) == 0  # the values come in the next bucket
    assert weights.load([(name, values)]) == 1
    assert torch.equal(weights.views[name], dequantize(values, scales))
