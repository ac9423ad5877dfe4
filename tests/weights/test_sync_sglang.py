"""Whole syncs to real SGLang on the CPU: every transport in both dtypes, what the audits find, what
heals.

In the stage of scripts/test_sglang.sh. One server per dtype for the whole module; each test uses an
attempt number of its own, so versions never repeat.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from real_engines import VOCAB, log_probs, named_weights, new_model, save_tiny_model, sync_args

from slime.config.machine import installed
from slime.engines.handle import EngineHandle
from slime.engines.launch import EngineSettings, EngineSpec, start_engine
from slime.engines.payload import by_element_size, flatten, layout
from slime.engines.sglang_api import Broadcast, EngineError
from slime.utils.async_utils import run
from slime.weights import audit
from slime.weights.audit import Probe, WeightAuditError
from slime.weights.settings import WeightSyncSettings
from slime.weights.sync import sync_weights
from slime.weights.transports import Transport, create_transport
from slime.weights.update import UpdateReport

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.real,
    pytest.mark.skipif(not installed("sglang"), reason="needs SGLang: scripts/test_sglang.sh"),
]
START_SECONDS = 400.0
DTYPES = [pytest.param("float32", marks=pytest.mark.long), "bfloat16"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(
    dtype: str, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineHandle]:
    """One server at a time: pytest runs all tests of one dtype, then those of the other."""
    log = tmp_path_factory.mktemp("logs") / f"{dtype}.log"
    server = start_engine(
        EngineSettings.from_args(sglang_args(model, dtype)), EngineSpec(0, str(model)), log_path=log
    )
    try:
        server.wait_ready(START_SECONDS)
        yield EngineHandle(server.url)
    finally:
        server.stop()


def sglang_args(model: Path, dtype: str, **changes: Any) -> Any:
    settings: dict[str, Any] = dict(
        rollout_backend="sglang",
        hf_checkpoint=str(model),
        train_dtype=dtype,
        rollout_dtype=dtype,
        sglang={"device": "cpu", "max_total_tokens": 4096},
        threads_per_process=1,
        update_weight_mode="delta",
    )
    return sync_args(**(settings | changes))


_made: list[Transport] = []


@pytest.fixture(autouse=True)
def closed_transports() -> Iterator[None]:
    yield
    while _made:
        run(_made.pop().close())


def transport_of(name: str, args: Any, folder: Path) -> Transport:
    args.update_weight_disk_dir = str(folder / "published")
    args.update_weight_transport = "disk" if name in ("disk", "delta") else "nccl"
    args.update_weight_mode = "delta" if name == "delta" else "full"
    _made.append(create_transport(WeightSyncSettings.from_args(args), colocated_host=name == "ipc"))
    return _made[-1]


def probe_of(trained: Any, dtype: str) -> Probe:
    tokens = audit.probe_tokens(VOCAB)
    cast = new_model(0).to(getattr(torch, dtype))
    cast.load_state_dict(trained.state_dict())
    return Probe(tokens, log_probs(cast, tokens))


def sync(
    args: Any,
    trained: Any,
    engine: Any,
    transport: Transport,
    version: str,
    probe: Probe | None = None,
    **more: Any,
) -> UpdateReport:
    settings = WeightSyncSettings.from_args(args)
    report = sync_weights(
        settings, iter(named_weights(trained)), [engine], transport, version, True, **more
    )
    assert report is not None
    if probe is not None:
        run(audit.probe_engines(settings, [engine], probe))
    return report


@pytest.mark.parametrize("name", ["ipc", "distributed", "disk", "delta"])
def test_sglang_gets_the_trainers_weights(
    name: str, dtype: str, engine: EngineHandle, model: Path, tmp_path: Path
) -> None:
    args = sglang_args(model, dtype)
    transport = transport_of(name, args, tmp_path)
    assert transport.name == name
    attempt = len(name)
    for step in range(2):
        trained = new_model(100 * attempt + step)
        report = sync(
            args, trained, engine, transport, f"{attempt}.{step}", probe=probe_of(trained, dtype)
        )
        assert 0 < report.pause_seconds <= report.seconds and report.audit_seconds > 0
        assert report.tensors == len(named_weights(trained))
        assert run(engine.info()).weight_version == f"{attempt}.{step}"
    before = run(engine.checksum())
    sync(
        args,
        trained,
        engine,
        transport,
        f"{attempt}.2",
        check_equal=True,
        probe=probe_of(trained, dtype),
    )
    assert run(engine.checksum()) == before
    assert sync(args, new_model(100 * attempt + 2), engine, transport, f"{attempt}.3").nbytes > 0
    assert run(engine.checksum()) != before


def test_sglang_reads_a_flat_bucket_as_the_sender_lays_it_out() -> None:
    # only found: to import it would patch transformers in this process
    package = importlib.util.find_spec("sglang")
    assert package is not None and package.submodule_search_locations
    file = Path(package.submodule_search_locations[0]) / "srt/weight_sync/tensor_bucket.py"
    spec = importlib.util.spec_from_file_location("tensor_bucket", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tensors = by_element_size(
        [
            ("flag", torch.tensor([True, False, True])),
            ("matrix", torch.randn(7, 3).bfloat16().T),
            ("long", torch.arange(5)),
            ("norm", torch.randn(3)),
        ]
    )
    entries, size = layout(tensors, alignment=1)
    order = Broadcast(
        [n for n, _ in tensors],
        [e.dtype for e in entries],
        [e.shape for e in entries],
        "g",
        "0.1",
        True,
    )
    said = json.loads(order.body)
    assert said["load_format"] == "flattened_bucket"
    bucket = module.FlattenedTensorBucket.empty(
        said["names"], said["dtypes"], said["shapes"], "cpu"
    )
    bucket.get_flattened_tensor().copy_(flatten(tensors, entries, size))
    for (name, got), (sent_name, sent) in zip(bucket.reconstruct_tensors(), tensors, strict=True):
        assert name == sent_name and got.dtype == sent.dtype and torch.equal(got, sent)


def test_one_changed_tensor_is_all_that_a_delta_carries(
    dtype: str, engine: EngineHandle, model: Path, tmp_path: Path
) -> None:
    args = sglang_args(model, dtype)
    transport, trained = transport_of("delta", args, tmp_path), new_model(7)
    whole = sync(args, trained, engine, transport, "20.0").nbytes
    before = run(engine.checksum())
    trained.state_dict()["model.layers.0.mlp.gate_proj.weight"][3, 3] += 1.0
    report = sync(args, trained, engine, transport, "20.1", probe=probe_of(trained, dtype))
    assert report.nbytes < 100 < whole and 0 < report.density <= 4 / whole
    after = run(engine.checksum())
    assert [name for name in after if after[name] != before[name]] == [
        "model.layers.0.mlp.gate_up_proj.weight"
    ]


def test_a_base_that_is_gone_and_damaged_bytes_are_healed(
    dtype: str, engine: EngineHandle, model: Path, tmp_path: Path
) -> None:
    args = sglang_args(model, dtype)
    transport, trained = transport_of("delta", args, tmp_path), new_model(8)
    sync(args, trained, engine, transport, "21.0")
    other_args = sglang_args(model, dtype)
    other = transport_of("ipc", other_args, tmp_path)
    # the loader's copy is not what the model holds any more
    sync(other_args, new_model(9), engine, other, "22.0")
    report = sync(
        args, new_model(10), engine, transport, "21.1", probe=probe_of(new_model(10), dtype)
    )
    assert report.density == 1.0  # its version was not the base: the whole

    def damage(folder: Path, engines: Any) -> None:
        for file in folder.glob("*.zst"):
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 0xFF
            file.write_bytes(bytes(data))

    transport.written = damage  # type: ignore[attr-defined]
    trained = new_model(11)
    report = sync(args, trained, engine, transport, "21.2", probe=probe_of(trained, dtype))
    assert report.nbytes > sum(t.numel() * t.element_size() for _, t in named_weights(trained)) // 2
    assert run(engine.health())


def test_a_sync_that_was_torn_is_marked_and_healed(
    dtype: str, engine: EngineHandle, model: Path, tmp_path: Path
) -> None:
    args = sglang_args(model, dtype)
    transport = transport_of("ipc", args, tmp_path)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from named_weights(new_model(12))[:9]
        raise ArithmeticError("a rank is gone")

    with pytest.raises(ArithmeticError, match="rank is gone"):
        sync_weights(
            WeightSyncSettings.from_args(args), weights(), [engine], transport, "23.0", True
        )
    assert run(engine.info()).weight_version == "23.0-torn"
    trained = new_model(13)
    sync(args, trained, engine, transport, "23.1", probe=probe_of(trained, dtype))


def test_the_audit_finds_other_weights(
    dtype: str, engine: EngineHandle, model: Path, tmp_path: Path
) -> None:
    args = sglang_args(model, dtype)
    transport, trained = transport_of("ipc", args, tmp_path), new_model(14)
    with pytest.raises(WeightAuditError, match=f"{engine.url}"):
        sync(args, trained, engine, transport, "24.0", probe=probe_of(new_model(15), dtype))
    forgotten = "model.layers.1.mlp.up_proj.weight"
    sync(args, trained, engine, transport, "24.1")
    with pytest.raises(
        WeightAuditError, match=r"1 of 14 tensors.*model.layers.1.mlp.gate_up_proj.weight"
    ):
        kept = [(name, tensor) for name, tensor in named_weights(trained) if name != forgotten]
        sync_weights(
            WeightSyncSettings.from_args(args),
            kept,
            [engine],
            transport,
            "24.2",
            True,
            check_equal=True,
        )
    sync(args, trained, engine, transport, "24.3", probe=probe_of(trained, dtype))


def test_a_refused_tensor_is_told_in_sglangs_words(
    dtype: str, engine: EngineHandle, model: Path, tmp_path: Path
) -> None:
    """An update outside its brackets is refused and changes nothing."""
    from slime.engines.payload import Bucket

    before = run(engine.checksum())
    with pytest.raises(EngineError, match="begin_weight_update"):
        run(engine.push(Bucket(0, named_weights(new_model(16)), last=True), "25.0"))
    assert run(engine.checksum()) == before


def save_tied_experts(folder: Path, seed: int) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        max_position_embeddings=4096, tie_word_embeddings=True, initializer_range=0.3, eos_token_id=1,
    )  # fmt: skip
    trained = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    trained.save_pretrained(folder)
    return trained


@pytest.mark.long
def test_a_tied_output_layer_that_sglang_holds_as_a_tensor_of_its_own(tmp_path: Path) -> None:
    """SGLang's class for Qwen3-MoE ignores ``tie_word_embeddings``. The checkpoint does not have
    its output layer.
    """
    from safetensors.torch import load_file

    model = save_tiny_model(tmp_path / "model")  # for the tokenizer
    save_tied_experts(model, 0)
    args = sglang_args(model, "float32")
    settings = EngineSettings.from_args(args)
    server = start_engine(settings, EngineSpec(0, str(model)), log_path=tmp_path / "log")
    try:
        server.wait_ready(START_SECONDS)
        engine = EngineHandle(server.url)
        for step, name in enumerate(["ipc", "distributed", "disk", "delta", "delta"]):
            trained = save_tied_experts(tmp_path / str(step), step + 1)
            tensors = load_file(tmp_path / str(step) / "model.safetensors")
            assert "lm_head.weight" not in tensors
            transport = transport_of(name, args, tmp_path / "versions")
            weights = WeightSyncSettings.from_args(args)
            for version, equal in ((f"30.{2 * step}", False), (f"30.{2 * step + 1}", True)):
                report = sync_weights(
                    weights, tensors.items(), [engine], transport, version, True, check_equal=equal
                )
                assert report is not None and report.tensors == len(tensors) + 1
            tokens = audit.probe_tokens(VOCAB)
            run(audit.probe_engines(weights, [engine], Probe(tokens, log_probs(trained, tokens))))
    finally:
        server.stop()
