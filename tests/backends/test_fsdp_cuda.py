"""What differs on CUDA: varlen attention, mixed precision on one rank, and giving memory back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from budget_step import FLAGS, SHAPE, check_measured_budget
from fsdp_helpers import (
    LORA,
    make_args,
    make_backend,
    make_samples,
    save_tiny_llama,
    weights_of,
    whole_batch,
)

from slime.algorithms.sequences import spread
from slime.backends.bank import WeightBank
from slime.backends.collectives import local
from slime.backends.create import create_backend
from slime.backends.fsdp.backend import FsdpBackend
from slime.backends.loss_inputs import TokenBatch
from slime.backends.train_loop import train_on_rollout
from slime.engines.process import free_port

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


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
    return train_on_rollout(backend, whole_batch(make_samples(seed=seed), micro_batch_size=8))[0]


def test_float32_equals_the_cpu(llama: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    flags = dict(kl_coef=0.01, clip_grad=0.0)
    cuda, cpu = on_cuda(llama, **flags), make_backend(make_args(llama, **flags))
    for seed in (0, 1):
        got, want = run(cuda, seed), run(cpu, seed)
        for name in ("train/loss", "train/grad_norm", "train/entropy_loss", "rollout/log_probs"):
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("share", [True, False])
def test_bfloat16_varlen_is_close_to_float32(llama: Path, share: bool, compiled: bool) -> None:
    varlen = on_cuda(
        llama, train_dtype="bfloat16", share_prompt_in_pack=share, compile_layers=compiled
    )
    exact = make_backend(make_args(llama))
    batch = whole_batch(make_samples(), micro_batch_size=16)
    got = torch.cat(varlen.log_probs(batch)["log_probs"])
    want = torch.cat(exact.log_probs(batch)["log_probs"])
    # As close as torch's own attention in the same dtype is.
    sdpa = on_cuda(llama, train_dtype="bfloat16", attn_implementation="sdpa")
    noise = (torch.cat(sdpa.log_probs(batch)["log_probs"]) - want).abs().mean()
    assert (got - want).abs().mean() < 1.3 * noise < 0.1
    metrics, reference = run(varlen), run(exact)
    assert metrics["train/grad_norm"] == pytest.approx(reference["train/grad_norm"], rel=0.05)
    assert {str(p.dtype) for _, p in varlen.named_parameters} == {"torch.float32"}


def test_sleep_gives_memory_back_and_wake_restores_every_bit(tmp_path: Path) -> None:
    big = save_tiny_llama(tmp_path, hidden_size=512, intermediate_size=2048, vocab_size=20000)
    backend = on_cuda(big, train_dtype="bfloat16", keep_old_actor=True)
    run(backend)
    before = {n: t.cpu() for n, t in backend.named_weights()}
    moments = {n: local(t).cpu() for n, t in backend.optimizer.tensors().items()}
    torch.cuda.synchronize()
    awake = torch.cuda.memory_allocated()
    parameters = sum(p.numel() * 4 for _, p in backend.named_parameters)
    backend.sleep(keep_weights=True)
    assert awake - torch.cuda.memory_allocated() > 1.9 * parameters
    assert all(torch.equal(before[n], t.cpu()) for n, t in backend.named_weights()), (
        "they can still be sent"
    )
    backend.sleep()
    asleep = torch.cuda.memory_allocated()
    assert awake - asleep > 2.9 * parameters
    backend.wake()
    assert all(torch.equal(before[n], t.cpu()) for n, t in backend.named_weights())
    for name, tensor in backend.optimizer.tensors().items():
        assert torch.equal(local(tensor).cpu(), moments[name])
    assert run(backend, 1)["train/grad_norm"] > 0.0
    old = backend.log_probs(whole_batch(make_samples()), "old_actor")["log_probs"]
    now = backend.log_probs(whole_batch(make_samples()))["log_probs"]
    assert not torch.equal(old[0], now[0])


def test_snapshot_is_exact(llama: Path, tmp_path: Path) -> None:
    first = on_cuda(llama, train_dtype="bfloat16")
    run(first)
    first.save(tmp_path)
    second = on_cuda(llama, train_dtype="bfloat16")
    second.load(tmp_path)
    a, b = weights_of(first), weights_of(second)
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert run(first, 1)["train/loss"] == pytest.approx(run(second, 1)["train/loss"], rel=1e-3)


def test_asynchronous_saves_copy_into_pinned_memory(tmp_path: Path) -> None:
    """``pytest -s`` prints for how long they block."""
    big = save_tiny_llama(
        tmp_path / "model", hidden_size=1024, intermediate_size=4096, vocab_size=64000
    )
    backend = on_cuda(big, train_dtype="bfloat16", async_save=True)
    run(backend)
    for name in ("first", "second", "third"):
        torch.cuda.synchronize()
        start = time.perf_counter()
        backend.save(tmp_path / name)
        blocked = time.perf_counter() - start
        weights = weights_of(backend)
        run(backend, 1)  # while the files are written
        assert backend.saving is not None
        files = backend.saving.finish(300)
        copies = backend.state.memory.tensors
        assert all(tensor.is_pinned() for tensor in copies)
        gib = sum(tensor.nbytes for tensor in copies) / 2**30
        print(
            f"{name} --async-save of {gib:.2f} GiB: blocked {blocked / gib:.3f} s per GiB, "
            f"{len(files)} files"
        )
    other = on_cuda(big, train_dtype="bfloat16")
    other.load(tmp_path / "third")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in weights_of(other).items())


@pytest.mark.parametrize(
    "flag", [{"ref_update_interval": 1, "use_kl_loss": True}, {"keep_old_actor": True}]
)
def test_moved_copies_come_back_in_a_resumed_run(
    llama: Path, tmp_path: Path, flag: dict[str, Any]
) -> None:
    flags = dict(train_dtype="bfloat16", offload_train=True, **flag)  # copies in pinned memory
    tag = "ref" if "use_kl_loss" in flag else "old_actor"
    first, second = on_cuda(llama, **flags), on_cuda(llama, **flags)
    initial = [tensor.clone() for tensor in second.bank.copies[tag]]
    assert all(tensor.is_pinned() for tensor in second.bank.copies[tag])
    run(first)
    first.copy_weights("actor", tag)
    saved = [tensor.clone() for tensor in first.bank.copies[tag]]
    run(first, 1)
    first.save(tmp_path)
    second.load(tmp_path)
    loaded = second.bank.copies[tag]
    assert all(torch.equal(a, b) for a, b in zip(loaded, saved, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(loaded, initial, strict=True))


@pytest.mark.parametrize("offload_train", [False, True])
def test_a_reference_scores_alike_wherever_it_is_kept(
    llama: Path, tmp_path: Path, offload_train: bool
) -> None:
    other = save_tiny_llama(tmp_path, seed=5, hidden_size=128, intermediate_size=160)
    flags = dict(
        train_dtype="bfloat16", use_kl_loss=True, ref_load=str(other), offload_train=offload_train
    )
    backend, plain = on_cuda(llama, **flags), on_cuda(other, train_dtype="bfloat16")
    assert {tensor.is_cuda for tensor in backend.bank.copies["ref"]} == {not offload_train}
    before = weights_of(backend)
    batch = whole_batch(make_samples())
    for _ in range(2):
        got, want = (
            backend.log_probs(batch, "ref")["log_probs"],
            plain.log_probs(batch)["log_probs"],
        )
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert all(torch.equal(before[name], tensor) for name, tensor in backend.named_weights())


def seconds_per_gib(action: Callable[[], None], nbytes: int) -> float:
    action()
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / (nbytes / 2**30)


def test_swapping_a_copy_costs_a_fraction_of_what_pageable_memory_costs() -> None:
    """Prints seconds per GiB of float32 weights, for a swap in and out; run with ``-s`` to see
    them.
    """
    named = [(f"layer{i}", torch.randn(2**26, device="cuda")) for i in range(8)]  # 2 GiB
    nbytes = sum(tensor.nbytes for _, tensor in named)
    pinned = [torch.randn(2**26, pin_memory=True) for _ in named]

    def through_pageable_memory() -> None:  # as it was done before
        for _ in range(2):
            for (_, mine), copy in zip(named, pinned, strict=True):
                before = mine.to("cpu", copy=True)
                mine.copy_(copy)
                copy.copy_(before)

    def swap(bank: WeightBank) -> None:
        with bank.using("ref"):
            pass

    figures = {"pageable": seconds_per_gib(through_pageable_memory, nbytes)}
    for name, options in {
        "pinned": {"dtype": torch.bfloat16},
        "on_device": {"on_device": True},
    }.items():
        bank = WeightBank(named, **options)
        bank.copy("actor", "ref")
        figures[name] = seconds_per_gib(partial(swap, bank), nbytes)
    print(
        "swap in and out, seconds per GiB:",
        {name: round(seconds, 4) for name, seconds in figures.items()},
    )
    assert figures["pinned"] < 0.5 * figures["pageable"]
    assert figures["on_device"] < 0.1 * figures["pageable"]


def test_the_measured_budget_predicts_the_memory_of_a_training_step(tmp_path: Path) -> None:
    check_measured_budget(on_cuda(save_tiny_llama(tmp_path / "model", **SHAPE), **FLAGS))


# --- adapters (LoRA)
# ---------------------------------------------------------------------------------

ADAPTER = LORA | dict(lora_rank=8, lora_alpha=16.0)


def log_probs(backend: FsdpBackend, model: Any = "actor") -> torch.Tensor:
    return torch.cat(
        backend.log_probs(whole_batch(make_samples(), micro_batch_size=16), model)["log_probs"]
    ).cpu()


def test_an_adapter_in_float32_equals_the_cpu(llama: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    flags = ADAPTER | dict(kl_coef=0.01, clip_grad=0.0)
    cuda, cpu = on_cuda(llama, **flags), make_backend(make_args(llama, **flags))
    for seed in (0, 1):
        got, want = run(cuda, seed), run(cpu, seed)
        for name in ("train/loss", "train/grad_norm", "train/entropy_loss", "rollout/log_probs"):
            assert got[name] == pytest.approx(want[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("compiled", [False, True])
def test_an_adapter_in_bfloat16_is_close_to_float32(llama: Path, compiled: bool) -> None:
    """Before and after two steps, and with the adapter off, which is the base still."""
    flags = dict(train_dtype="bfloat16", compile_layers=compiled, kl_coef=0.01)
    backend, exact = (
        on_cuda(llama, **ADAPTER, **flags),
        make_backend(make_args(llama, **ADAPTER, kl_coef=0.01)),
    )
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
    backend = on_cuda(llama, **ADAPTER, train_dtype="bfloat16", lora_export="merged")
    run(backend)
    backend.save_hf(tmp_path / "merged")
    merged = on_cuda(tmp_path / "merged", train_dtype="bfloat16")
    assert (log_probs(merged) - log_probs(backend)).abs().mean() < 0.05


def test_sleep_and_a_snapshot_of_an_adapter_are_exact(llama: Path, tmp_path: Path) -> None:
    first = on_cuda(llama, **ADAPTER, train_dtype="bfloat16")
    run(first)
    before = weights_of(first)
    first.sleep()
    first.wake()
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(first).items())
    first.save(tmp_path)
    second = on_cuda(llama, **ADAPTER, train_dtype="bfloat16")
    second.load(tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(second).items())
    moments = first.optimizer.tensors(), second.optimizer.tensors()
    assert all(torch.equal(local(moments[0][name]), local(moments[1][name])) for name in moments[0])
    assert run(first, 1)["train/loss"] == pytest.approx(run(second, 1)["train/loss"], rel=1e-3)


def test_the_inputs_of_the_loss_are_copied_without_waiting_for_the_gpu() -> None:
    batch = whole_batch(make_samples())
    lengths = batch["response_lengths"]
    log_probs = torch.zeros(sum(lengths), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = TokenBatch.from_rank_batch(batch, range(len(lengths)), log_probs=log_probs)
        per_token = spread(tokens.rollout_mask_sums, tokens.response_lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = torch.tensor(batch["rollout_mask_sums"]).repeat_interleave(torch.tensor(lengths))
    assert torch.equal(per_token.cpu(), expected)
