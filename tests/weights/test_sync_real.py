"""Whole syncs to real embedded engines: every transport, two engines at once, engines lost on the
way.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from real_engines import (
    VOCAB,
    Engines,
    log_probs,
    named_weights,
    new_model,
    save_tiny_model,
    sync_args,
    sync_settings,
)

from slime.engines.handle import EngineHandle
from slime.engines.payload import Bucket
from slime.utils.async_utils import run
from slime.weights import audit
from slime.weights.audit import Probe, WeightAuditError
from slime.weights.settings import WeightSyncSettings
from slime.weights.sync import sync_weights
from slime.weights.transports import Transport, create_transport
from slime.weights.transports.distributed import DistributedTransport
from slime.weights.transports.shared_memory import SHARED_MEMORY
from slime.weights.update import UpdateReport, WeightSyncError

pytestmark = pytest.mark.real
TRANSPORTS = ["ipc", "distributed", "disk", "delta"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(model, tmp_path_factory.mktemp("logs"))
    yield engines
    engines.stop()


@pytest.fixture(scope="module")
def pair(fleet: Engines) -> list[EngineHandle]:
    return fleet.start(2)


_made: list[Transport] = []


@pytest.fixture(autouse=True)
def closed_transports() -> Iterator[None]:
    yield
    while _made:
        run(_made.pop().close())


def make_transport(name: str, folder: Path, model: Path, args: Any) -> Transport:
    args.hf_checkpoint = str(model)
    args.update_weight_disk_dir = str(folder / "published")
    args.update_weight_transport = "disk" if name in ("disk", "delta") else "nccl"
    args.update_weight_mode = "delta" if name == "delta" else "full"
    _made.append(create_transport(WeightSyncSettings.from_args(args), colocated_host=name == "ipc"))
    return _made[-1]


def probe_of(trained: Any) -> Probe:
    tokens = audit.probe_tokens(VOCAB)
    return Probe(tokens, log_probs(trained, tokens))


def sync(
    args: Any,
    trained: Any,
    engines: list[Any],
    transport: Transport,
    version: str,
    probe: Probe | None = None,
    **more: Any,
) -> UpdateReport:
    settings = WeightSyncSettings.from_args(args)
    report = sync_weights(
        settings, iter(named_weights(trained)), engines, transport, version, True, **more
    )
    assert report is not None
    if probe is not None:
        run(audit.probe_engines(settings, engines, probe))
    return report


def version_of(engine: EngineHandle) -> str:
    return run(engine.info()).weight_version


def shared_segments() -> set[str]:
    return {name for name in os.listdir(SHARED_MEMORY) if name.startswith(f"torch_{os.getpid()}_")}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_two_engines_get_the_trainers_weights(
    name: str, pair: list[EngineHandle], model: Path, tmp_path: Path
) -> None:
    args, before = sync_args(), shared_segments()
    transport = make_transport(name, tmp_path, model, args)
    assert transport.name == name
    for step, seed in ((0, 11), (1, 12)):
        trained = new_model(seed)
        report = sync(args, trained, pair, transport, f"0.{step}", probe=probe_of(trained))
        assert report.tensors == len(named_weights(trained)) == len(report.digests)
        whole = sum(t.numel() * t.element_size() for _, t in named_weights(trained))
        assert report.nbytes == whole if name != "delta" or step == 0 else report.nbytes < whole
        assert 0 < report.pause_seconds <= report.seconds and report.audit_seconds > 0
        assert [version_of(engine) for engine in pair] == [f"0.{step}"] * 2
    published = [path.name for path in (tmp_path / "published").glob("[!.]*")]
    assert published == {"disk": ["weight_v0.1"], "delta": ["delta_v0.1"]}.get(name, [])
    run(transport.close())
    gc.collect()
    assert shared_segments() <= before
    assert not any((tmp_path / "published").glob("[!.]*"))
    answer = run(
        pair[0].generate(
            {"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
        )
    )
    assert answer["meta_info"]["weight_version"] == "0.1"


def test_every_tensor_was_written(pair: list[EngineHandle], model: Path, tmp_path: Path) -> None:
    args = sync_args()
    transport = make_transport("ipc", tmp_path, model, args)
    trained = new_model(21)
    sync(args, trained, pair, transport, "1.0")
    sync(args, trained, pair, transport, "1.1", check_equal=True, probe=probe_of(trained))
    forgotten = [
        (name, t)
        for name, t in named_weights(trained)
        if name != "model.layers.1.mlp.up_proj.weight"
    ]
    with pytest.raises(
        WeightAuditError, match=r"1 of 20 tensors.*model.layers.1.mlp.up_proj.weight"
    ):
        sync_weights(
            WeightSyncSettings.from_args(args),
            forgotten,
            pair,
            transport,
            "1.2",
            True,
            check_equal=True,
        )
    # heals, and they generate again
    sync(args, trained, pair, transport, "1.3", probe=probe_of(trained))


def test_a_norm_that_one_engine_did_not_get_ends_the_run(
    pair: list[EngineHandle], model: Path, tmp_path: Path
) -> None:
    name = "model.layers.0.input_layernorm.weight"

    class Forgetful(EngineHandle):
        async def push(
            self, bucket: Bucket, weight_version: str, others: Sequence[str] = ()
        ) -> None:
            kept = [(n, tensor) for n, tensor in bucket.tensors if n != name]
            await super().push(Bucket(bucket.index, kept, bucket.last), weight_version, others)

    args = sync_args()
    transport = make_transport("ipc", tmp_path, model, args)
    sync(args, new_model(81), pair, transport, "9.0")
    trained = new_model(82)
    trained.state_dict()[name].mul_(1.0001)
    forgetful = Forgetful(pair[1].url)
    with pytest.raises(WeightAuditError, match=f"{forgetful.url}.*{name}") as caught:
        sync(args, trained, [pair[0], forgetful], transport, "9.1")
    assert caught.value.tensors == [name]
    sync(args, trained, pair, transport, "9.2", probe=probe_of(trained))


def test_frozen_tensors_travel_once(pair: list[EngineHandle], model: Path, tmp_path: Path) -> None:
    args = sync_args(freeze_params_name_list=["embed_tokens"])
    transport = make_transport("ipc", tmp_path, model, args)
    trained = new_model(61)
    updated: set[str] = set()
    total = len(named_weights(trained))
    # nothing of ours is there yet
    assert sync(args, trained, pair, transport, "7.0", updated=updated).tensors == total
    assert (
        sync(
            args, trained, pair, transport, "7.1", probe=probe_of(trained), updated=updated
        ).tensors
        == total - 1
    )
    # SGLang's memory saver frees the weights of colocated engines, also those that are not trained.
    args = sync_args(
        freeze_params_name_list=["embed_tokens"], rollout_backend="sglang", offload_rollout=True
    )
    assert (
        sync(
            args, trained, pair, transport, "7.2", probe=probe_of(trained), updated=updated
        ).tensors
        == total
    )


def test_external_engines_of_an_earlier_run_get_the_frozen_tensors_too(
    pair: list[EngineHandle], model: Path, tmp_path: Path
) -> None:
    """Both runs have attempt 0, so the versions that the engines hold do not tell the runs
    apart.
    """
    args = sync_args(freeze_params_name_list=["embed_tokens"])
    transport = make_transport("ipc", tmp_path, model, args)
    earlier = new_model(65)
    updated: set[str] = set()
    for step in range(2):
        sync(args, earlier, pair, transport, f"0.{step}", updated=updated)
    trained = new_model(66)
    updated = set()
    sync(args, trained, pair, transport, "0.0", probe=probe_of(trained), updated=updated)


def test_an_error_while_gathering_leaves_no_engine_half_updated_unnoticed(
    pair: list[EngineHandle], model: Path, tmp_path: Path
) -> None:
    args = sync_args()
    transport = make_transport("ipc", tmp_path, model, args)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from named_weights(new_model(71))[:9]
        raise ArithmeticError("a rank is gone")

    with pytest.raises(ArithmeticError, match="rank is gone"):
        sync_weights(WeightSyncSettings.from_args(args), weights(), pair, transport, "8.0", True)
    assert {version_of(engine) for engine in pair} == {"8.0-torn"}
    healed = new_model(72)
    sync(args, healed, pair, transport, "8.1", probe=probe_of(healed))


def test_an_engine_with_other_weights_is_found(
    pair: list[EngineHandle], model: Path, tmp_path: Path
) -> None:
    args = sync_args(audit_weights=False)
    transport = make_transport("ipc", tmp_path, model, args)
    trained, name = new_model(31), "model.layers.0.self_attn.q_proj.weight"
    sync(args, trained, pair, transport, "2.0")
    altered = new_model(31)
    altered.state_dict()[name][0, 0] += 0.5
    sync(args, altered, pair[1:], transport, "2.1")
    infos = {engine.url: run(engine.info()) for engine in pair}
    sums = {engine.url: run(engine.checksum()) for engine in pair}
    with pytest.raises(WeightAuditError) as by_name:
        audit.check_digests(
            pair[1].url, {k: audit_digest(t) for k, t in named_weights(trained)}, sums[pair[1].url]
        )
    assert (by_name.value.engine, by_name.value.tensors) == (pair[1].url, [name])
    with pytest.raises(WeightAuditError, match=name):
        run(audit.audit_engines(pair, infos, {}, 30))
    with pytest.raises(WeightAuditError, match=f"{pair[1].url}"):
        run(audit.check_probe(pair, probe_of(trained), 1e-3, 30))
    sync(sync_args(), trained, pair, transport, "2.2", probe=probe_of(trained))


def audit_digest(tensor: torch.Tensor) -> str:
    from slime.models.digest import tensor_digest

    return tensor_digest(tensor)


def test_a_request_in_flight_goes_on_with_the_new_weights(
    pair: list[EngineHandle], model: Path, tmp_path: Path
) -> None:
    args = sync_args()
    transport = make_transport("ipc", tmp_path, model, args)
    sync(args, new_model(41), pair, transport, "3.0")
    request = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 1500, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(run(pair[0].generate(request))))
    thread.start()
    deadline = time.monotonic() + 120
    while not run(pair[0].load())["running"]:
        assert time.monotonic() < deadline, "the request never ran"
    sync(args, new_model(42), pair, transport, "3.1")
    thread.join(120)
    meta = answers[0]["meta_info"]
    assert meta["completion_tokens"] == 1500 and meta["finish_reason"]["type"] == "length"
    assert meta["weight_version"] == "3.1", meta.get("weight_versions")


def test_the_other_ranks_only_take_part_in_gathering() -> None:
    taken = []
    assert (
        sync_weights(
            sync_settings(),
            (taken.append(i) or ("n", None) for i in range(3)),
            [],
            None,
            "0.1",
            False,
        )
        is None
    )  # type: ignore[func-returns-value,misc]
    assert taken == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "blow"),
    [
        pytest.param("ipc", signal.SIGKILL, id="ipc-killed"),
        pytest.param("ipc", signal.SIGSTOP, id="ipc-stopped", marks=pytest.mark.long),
        pytest.param(
            "distributed", signal.SIGKILL, id="distributed-killed", marks=pytest.mark.long
        ),
        pytest.param("distributed", signal.SIGSTOP, id="distributed-stopped"),
    ],
)
def test_an_engine_lost_in_mid_sync(
    name: str, blow: int, pair: list[EngineHandle], fleet: Engines, model: Path, tmp_path: Path
) -> None:
    """It is named, every rank's gathering is completed, and the next sync works without it."""
    args = sync_args(distributed_timeout_minutes=0.1)
    transport = make_transport(name, tmp_path, model, args)
    if isinstance(transport, DistributedTransport):
        transport.grace = transport.probe = transport.stall = 2.0
    well, lost = pair[0], fleet.start(1)[0]
    sync(args, new_model(51), [well, lost], transport, "4.0")
    gathered: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for index, (tensor_name, tensor) in enumerate(named_weights(new_model(52))):
            if index == 9:
                os.kill(fleet.process_of(lost).pid, blow)
            gathered.append(tensor_name)
            yield tensor_name, tensor

    with pytest.raises(WeightSyncError) as caught:
        sync_weights(
            WeightSyncSettings.from_args(args), weights(), [well, lost], transport, "4.1", True
        )
    assert len(gathered) == len(named_weights(new_model(52)))
    assert list(caught.value.failed) == [lost.url] and f"engine {lost.url}" in str(caught.value)
    if name == "ipc":
        assert caught.value.synced == [well.url] and version_of(well) == "4.1"
    else:
        assert caught.value.torn == [well.url] and version_of(well) == "4.1-torn"
    healed = new_model(53)
    sync(args, healed, [well], transport, "4.2", probe=probe_of(healed))
    assert version_of(well) == "4.2"
