"""Adapters on CUDA: compiled layers, mixed precision on one rank, sleep, and snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import make_args, make_backend, make_samples, save_tiny_llama, weights_of, whole_batch

from slime.backends.collectives import local
from slime.backends.create import create_backend
from slime.backends.fsdp.backend import FsdpBackend
from slime.backends.train_loop import train_on_rollout
from slime.engines.process import free_port

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

LORA = dict(
    lora_rank=8,
    lora_alpha=16.0,
    use_rslora=False,
    lora_target_modules=["all-linear"],
    lora_sync="merged",
    lr=1e-2,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Kernels want head sizes that are multiples of 8.
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), hidden_size=128, intermediate_size=160)


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def on_cuda(path: Path, **flags: Any) -> FsdpBackend:
    backend = create_backend(make_args(path, **flags), "actor", 0, 1, "127.0.0.1", free_port())
    assert isinstance(backend, FsdpBackend)
    return backend


def run(backend: FsdpBackend, seed: int = 0) -> dict[str, float]:
    return train_on_rollout(backend, backend.args, whole_batch(make_samples(seed=seed), micro_batch_size=8))[0]


def log_probs(backend: FsdpBackend, model: Any = "actor") -> torch.Tensor:
    return torch.cat(backend.log_probs(whole_batch(make_samples(), micro_batch_size=16), model)["log_probs"]).cpu()


def test_float32_equals_the_cpu(llama: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    flags = LORA | dict(kl_coef=0.01, clip_grad=0.0)
    cuda, cpu = on_cuda(llama, **flags), make_backend(make_args(llama, **flags))
    for seed in (0, 1):
        got, want = run(cuda, seed), run(cpu, seed)
        for name in ("train/loss", "train/grad_norm", "train/entropy_loss", "rollout/log_probs"):
            assert got[name] == pytest.approx(want[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("compiled", [False, True])
def test_bfloat16_is_close_to_float32(llama: Path, compiled: bool) -> None:
    """Before and after two steps, and with the adapter off, which is the base still."""
    flags = dict(train_dtype="bfloat16", compile_layers=compiled, kl_coef=0.01)
    backend, exact = on_cuda(llama, **LORA, **flags), make_backend(make_args(llama, **LORA, kl_coef=0.01))
    base = on_cuda(llama, **flags)
    untouched = log_probs(base)
    # As close as the model without an adapter is.
    noise = (untouched - log_probs(make_backend(make_args(llama)))).abs().mean()
    assert noise < 0.1
    for seed in (0, 1):
        assert (log_probs(backend) - log_probs(exact)).abs().mean() < 2 * noise + 0.02 * seed
        got, want = run(backend, seed), run(exact, seed)
        assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=0.1)
    assert (log_probs(backend, "ref") - untouched).abs().mean() <= noise
    assert (log_probs(backend) - untouched).abs().mean() > 10 * noise, "the steps changed the model"
    assert backend.adapter is not None
    assert {p.dtype for _, p in backend.adapter.trained} == {torch.float32}
    assert {p.dtype for _, p in backend.adapter.base} == {torch.bfloat16}


def test_merged_weights_are_what_the_adapter_computes(llama: Path, tmp_path: Path) -> None:
    backend = on_cuda(llama, **LORA, train_dtype="bfloat16", lora_export="merged")
    run(backend)
    backend.save_hf(tmp_path / "merged")
    merged = on_cuda(tmp_path / "merged", train_dtype="bfloat16")
    assert (log_probs(merged) - log_probs(backend)).abs().mean() < 0.05


def test_sleep_and_a_snapshot_are_exact(llama: Path, tmp_path: Path) -> None:
    first = on_cuda(llama, **LORA, train_dtype="bfloat16")
    run(first)
    before = weights_of(first)
    first.sleep()
    first.wake()
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(first).items())
    first.save(tmp_path)
    second = on_cuda(llama, **LORA, train_dtype="bfloat16")
    second.load(tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(second).items())
    moments = first.optimizer.tensors(), second.optimizer.tensors()
    assert all(torch.equal(local(moments[0][name]), local(moments[1][name])) for name in moments[0])
    assert run(first, 1)["train/loss"] == pytest.approx(run(second, 1)["train/loss"], rel=1e-3)
