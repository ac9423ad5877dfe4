"""Weights, snapshots and starting of one rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import (
    make_args,
    make_backend,
    make_samples,
    save_tiny_llama,
    save_tiny_qwen3_moe,
    weights_of,
    whole_batch,
)
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from slime.backends.create import create_backend
from slime.backends.fsdp import model
from slime.backends.saving import BackgroundSave
from slime.backends.train_loop import train_on_rollout
from slime.checkpoint import snapshot
from slime.checkpoint.files import FileEntry
from slime.checkpoint.snapshot import SnapshotError
from slime.engines.process import free_port
from slime.models.loading import load_hf_model
from slime.models.stored import StoredWeights


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def train(backend: Any, seed: int) -> dict[str, float]:
    metrics, _ = train_on_rollout(backend, whole_batch(make_samples(seed=seed)))
    return {k: v for k, v in metrics.items() if not k.startswith("perf/")}


@pytest.mark.parametrize("family", ["llama", "moe"])
def test_names_and_values_are_those_on_disk(llama: Path, tmp_path: Path, family: str) -> None:
    path = llama if family == "llama" else save_tiny_qwen3_moe(tmp_path)
    named = list(make_backend(make_args(path)).named_weights())
    disk = load_file(path / "model.safetensors")
    assert len(named) == len(dict(named))
    assert {n for n, _ in named} == set(disk)  # tied weights once, one tensor per expert
    assert all(torch.equal(t, disk[n]) for n, t in named)


def test_bfloat16_weights_are_what_computes(llama: Path) -> None:
    backend = make_backend(make_args(llama))
    backend.args.train_dtype = "bfloat16"
    assert {t.dtype for _, t in backend.named_weights()} == {torch.bfloat16}


@pytest.mark.parametrize("async_save", [False, True])
def test_resume_is_exact_to_the_bit(llama: Path, tmp_path: Path, async_save: bool) -> None:
    flags = dict(
        lr_decay_style="cosine",
        lr_warmup_iters=2,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        ref_update_interval=1,
    )
    flags["async_save"] = async_save
    first = make_backend(make_args(llama, **flags))
    train(first, 0)
    first.copy_weights("actor", "ref")
    train(first, 1)
    first.save(tmp_path / "state")
    noise = torch.rand(4)
    straight = [train(first, seed) for seed in (2, 3)]  # while the snapshot is written
    if async_save:
        assert first.saving is not None
        first.saving.finish(60)
    second = make_backend(make_args(llama, **flags))
    second.load(tmp_path / "state")
    assert torch.equal(torch.rand(4), noise)
    assert [train(second, seed) for seed in (2, 3)] == straight
    a, b = weights_of(first), weights_of(second)
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_an_asynchronous_save_waits_for_the_one_before(llama: Path, tmp_path: Path) -> None:
    """Its copies lie in the same memory, which is free once the files are written."""
    backend = make_backend(make_args(llama, async_save=True, phase_timeout=0.01))
    written: Future[list[FileEntry]] = Future()
    backend.saving = BackgroundSave(written.result)
    with pytest.raises(TimeoutError, match="was not written"):
        backend.save(tmp_path / "state")
    written.set_result([])
    backend.save(tmp_path / "state")
    assert backend.saving.finish(60)


def test_snapshot_without_optimizer_and_for_the_wrong_role(llama: Path, tmp_path: Path) -> None:
    backend = make_backend(make_args(llama, no_save_optim=True))
    train(backend, 0)
    backend.save(tmp_path)
    other = make_backend(make_args(llama))
    other.load(tmp_path)
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights_of(backend).values(), weights_of(other).values(), strict=True)
    )
    assert all(not t.any() for t in other.optimizer.tensors().values())
    with pytest.raises(ValueError, match=r"actor.*critic"):
        make_backend(make_args(llama), "critic").load(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        other.load(tmp_path / "nowhere")


def test_a_snapshot_of_a_deeper_model_is_refused(llama: Path, tmp_path: Path) -> None:
    """All that a model with fewer layers reads is in it, with the same shapes."""
    make_backend(make_args(llama)).save(tmp_path / "saved")
    shallow = save_tiny_llama(tmp_path / "shallow", num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"another model.*model\.layers\.1\."):
        make_backend(make_args(shallow)).load(tmp_path / "saved")


def test_a_snapshot_with_another_optimizer_tells_how_to_leave_it_out(
    llama: Path, tmp_path: Path
) -> None:
    make_backend(make_args(llama, use_stateless_adam=True)).save(tmp_path)
    with pytest.raises(ValueError, match=r"optimizer/step/.*--no-load-optim"):
        make_backend(make_args(llama)).load(tmp_path)
    make_backend(make_args(llama, no_load_optim=True)).load(tmp_path)


def test_parts_of_a_snapshot_may_be_left_aside(llama: Path, tmp_path: Path) -> None:
    flags = dict(use_kl_loss=True, kl_loss_coef=0.1, ref_update_interval=1)
    first = make_backend(make_args(llama, **flags))
    fresh = weights_of(first)
    train(first, 0)
    first.copy_weights("actor", "ref")
    first.save(tmp_path)
    noise = torch.rand(4)
    weights_only = {"finetune": True, "no_load_optim": True, "no_load_rng": True}
    for left_out in ({"no_load_optim": True}, {"no_load_rng": True}, weights_only):
        other = make_backend(make_args(llama, **flags, **left_out))
        torch.manual_seed(99)
        other.load(tmp_path)
        assert torch.equal(torch.rand(4), noise) == ("no_load_rng" not in left_out)
        moments = any(t.any() for t in other.optimizer.tensors().values())
        assert moments == bool(other.optimizer.steps) == ("no_load_optim" not in left_out)
        held = weights_of(first)
        assert all(torch.equal(held[n], t) for n, t in other.named_weights())
        reference = fresh if "finetune" in left_out else held
        assert all(
            torch.equal(reference[n], t)
            for n, t in other.bank.tensors("ref").items()
            if n in reference
        )


@pytest.fixture
def process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of one rank."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "flag", [{"ref_update_interval": 1, "use_kl_loss": True}, {"keep_old_actor": True}]
)
def test_moved_copies_come_back_where_parameters_are_on_an_accelerator(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: dict[str, Any]
) -> None:
    """On CUDA ``DTensor.from_local`` moves a CPU tensor to the mesh's device, so what it returns is
    not the copy that lies in CPU memory. Simulated: on the parameters' mesh it returns a copy, and
    one rank is sharded, too."""

    def on_a_mesh(
        scorer: Any, hf: Any, device: torch.device, mesh: None, *args: Any, **more: Any
    ) -> None:
        shard(scorer, hf, device, model.shard_mesh(device, 1, None), *args, **more)

    shard = model.shard
    monkeypatch.setattr(model, "shard", on_a_mesh)
    tag = "ref" if "use_kl_loss" in flag else "old_actor"
    first, second = (make_backend(make_args(llama, **flag)) for _ in range(2))
    meshes = [
        p.device_mesh
        for backend in (first, second)
        for p in map(itemgetter(1), backend.named_parameters)
    ]
    from_local = DTensor.from_local

    def as_on_cuda(tensor: torch.Tensor, mesh: Any, *args: Any, **kwargs: Any) -> Any:
        moved = tensor.clone() if any(mesh is other for other in meshes) else tensor
        return from_local(moved, mesh, *args, **kwargs)

    monkeypatch.setattr(DTensor, "from_local", as_on_cuda)
    initial = [tensor.clone() for tensor in second.bank.copies[tag]]
    train(first, 0)
    first.copy_weights("actor", tag)
    saved = [tensor.clone() for tensor in first.bank.copies[tag]]
    train(first, 1)
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    loaded = second.bank.copies[tag]
    assert all(torch.equal(a, b) for a, b in zip(loaded, saved, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(loaded, initial, strict=True))


def test_critic_snapshot_holds_the_value_head(llama: Path, tmp_path: Path) -> None:
    args = make_args(llama, advantage_estimator="ppo")
    critic = make_backend(args, "critic")
    train(critic, 0)
    critic.save(tmp_path)
    again = make_backend(args, "critic")
    again.load(tmp_path)
    assert train(critic, 1) == train(again, 1)


def test_reset_of_optimizer_states(llama: Path) -> None:
    backend = make_backend(make_args(llama, reset_optimizer_states=True))
    train(backend, 0)
    steps = {float(t) for n, t in backend.optimizer.tensors().items() if n.startswith("step/")}
    train(backend, 1)
    assert (
        steps
        == {float(t) for n, t in backend.optimizer.tensors().items() if n.startswith("step/")}
        == {1.0}
    )


def test_stateless_adam_keeps_no_moments_and_moves_every_weight_by_the_learning_rate(
    llama: Path, tmp_path: Path
) -> None:
    flags = dict(use_stateless_adam=True, weight_decay=0.0, clip_grad=0.0)
    backend = make_backend(make_args(llama, **flags))
    before = weights_of(backend)
    train(backend, 0)
    moved = {name: after - before[name] for name, after in weights_of(backend).items()}
    steps = {
        float(x)
        for delta in moved.values()
        for x in delta.abs().flatten().double().mul(1e3).round(decimals=2)
    }
    # lr 1e-3 by the sign
    assert max(steps) == 1.0 and moved["model.norm.weight"].abs().min() > 0.9e-3
    assert backend.optimizer.tensors() == {}
    backend.save(tmp_path)
    other = make_backend(make_args(llama, **flags))
    other.load(tmp_path)
    assert train(backend, 1) == train(other, 1)


def test_hf_export_loads_again(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend(make_args(llama))
    train(backend, 0)
    monkeypatch.setattr("slime.models.stored.SHARD_BYTES", 10_000)
    (llama / "tokenizer_config.json").write_text("{}")
    backend.save_hf(tmp_path / "hf")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert (tmp_path / "hf" / "tokenizer_config.json").is_file()
    model = load_hf_model(tmp_path / "hf", torch.float32, "cpu")
    assert model.config.architectures == ["LlamaForCausalLM"]
    loaded = dict(model.named_parameters())
    assert all(torch.equal(t, loaded[n]) for n, t in backend.named_weights())


def test_an_export_has_the_dtype_that_is_asked_for(llama: Path, tmp_path: Path) -> None:
    backend = make_backend(make_args(llama, save_hf_dtype="bfloat16"))
    backend.save_hf(tmp_path / "hf")
    stored = StoredWeights(tmp_path / "hf")
    for name, tensor in backend.named_weights():
        assert torch.equal(stored.get(name), tensor.bfloat16()), name
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_reference_of_another_shape_is_an_error(llama: Path, tmp_path: Path) -> None:
    other = save_tiny_llama(tmp_path, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"model.layers.1"):
        make_backend(make_args(llama, ref_load=str(other), use_kl_loss=True))


def test_the_reference_is_what_ref_load_names_also_where_training_starts_from_other_weights(
    llama: Path, tmp_path: Path
) -> None:
    other = make_backend(make_args(llama))
    train(other, 0)
    other.save_hf(tmp_path / "start")
    backend = make_backend(make_args(llama, load=str(tmp_path / "start"), use_kl_loss=True))
    start, base = weights_of(other), weights_of(make_backend(make_args(llama)))
    assert all(torch.equal(start[n], t) for n, t in backend.named_weights())
    with backend.bank.using("ref"):
        reference = weights_of(backend)
    assert all(torch.equal(base[n], t) for n, t in reference.items())
    assert any(not torch.equal(start[n], t) for n, t in reference.items())


def test_sleep_and_wake_leave_the_cpu_alone(llama: Path) -> None:
    backend = make_backend(make_args(llama))
    before = weights_of(backend)
    backend.sleep()
    backend.wake()
    assert all(torch.equal(before[n], t) for n, t in backend.named_weights())
    train(backend, 0)


@pytest.mark.parametrize(
    ("changes", "role", "message"),
    [
        ({}, "judge", "actor or critic"),
        ({"train_backend": "deepspeed"}, "actor", "deepspeed"),
        ({"advantage_estimator": "nothing"}, "actor", "--advantage-estimator 'nothing'"),
    ],
)
def test_create_backend_refuses(
    llama: Path, changes: dict[str, Any], role: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        create_backend(make_args(llama, **changes), role, 0, 1, "127.0.0.1", 1)


@pytest.mark.parametrize("async_save", [False, True])
def test_digests_of_the_writer_are_checked_by_the_reader(
    llama: Path, tmp_path: Path, async_save: bool
) -> None:
    backend = make_backend(make_args(llama, async_save=async_save))
    temp = snapshot.begin(tmp_path, 0)
    written = backend.save(temp / "actor")
    if async_save:
        assert written == []
        written = backend.saving.finish(60)
    names = {entry["path"] for entry in written}
    assert names == {
        p.relative_to(temp / "actor").as_posix() for p in temp.rglob("*") if p.is_file()
    }
    entries = [
        FileEntry(**{**entry, "path": f"actor/{entry['path']}", "rank": 0}) for entry in written
    ]
    final = snapshot.commit(temp, {"rollout_id": 0}, entries)
    found = snapshot.latest(tmp_path)
    assert found is not None
    snapshot.verify(found, of_ranks=True)
    other = make_backend(make_args(llama))
    other.load(final / "actor")
    largest = max(final.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.raises(SnapshotError, match=f"{largest.name} has changed"):
        other.load(final / "actor")
