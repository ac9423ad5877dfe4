"""Passes without a backward in packs of their own (``--log-probs-max-tokens-per-gpu``), on one
rank.

Several ranks: ``test_fsdp_ranks.py`` and ``megatron/test_megatron_layouts.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_helpers import make_args, make_backend, make_samples, save_tiny_llama, whole_batch

from slime.backends.fsdp.backend import FsdpBackend
from slime.backends.train_loop import train_on_rollout


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@contextmanager
def forwards(backend: FsdpBackend) -> Iterator[list[int]]:
    """Number of tokens of each micro-batch that runs meanwhile."""
    seen: list[int] = []
    hook = backend.scorer.register_forward_pre_hook(
        lambda _, given: seen.append(given[0].kwargs["input_ids"].numel())
    )
    yield seen
    hook.remove()


def score(
    backend: FsdpBackend, batch: dict[str, Any]
) -> tuple[dict[str, list[torch.Tensor]], list[int]]:
    with forwards(backend) as seen:
        if backend.role == "critic":
            return {"values": backend.values(batch)}, seen
        return backend.log_probs(batch, with_entropy=True), seen


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("share", [True, False])
def test_the_budget_sets_the_number_of_packs_and_not_the_scores(
    llama: Path, role: str, share: bool
) -> None:
    estimator = "ppo" if role == "critic" else "grpo"
    args = make_args(llama, advantage_estimator=estimator, share_prompt_in_pack=share)
    backend = make_backend(args, role)
    # in float32 the order of sums, which the rows of a pack decide, shows in the last bits
    backend.scorer.double()
    batch = whole_batch(make_samples(groups=6), micro_batch_size=1)
    expected, seen = score(backend, batch)
    assert len(seen) == 24, "as in training"
    counts = []
    for budget in (40, 120, 10_000):
        backend.packing = replace(backend.packing, forward_max_tokens=budget)
        scores, seen = score(backend, batch)
        assert max(seen) <= budget
        counts.append(len(seen))
        assert set(scores) == set(expected)
        for name, values in scores.items():
            for got, want in zip(values, expected[name], strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
    assert 24 > counts[0] > counts[1] > counts[2] == 1


def test_a_pack_of_the_same_samples_scores_bit_for_bit_alike(llama: Path) -> None:
    """Scores of other packs differ in the last bits: kernels for matrix products choose the order
    of their sums by the number of rows."""
    args = make_args(llama, log_probs_max_tokens_per_gpu=10_000)
    backend = make_backend(args)
    batch = whole_batch(make_samples(), micro_batch_size=16)
    own = backend.log_probs(batch)["log_probs"]
    backend.packing = replace(backend.packing, forward_max_tokens=None)
    training = backend.log_probs(batch)["log_probs"]
    assert all(torch.equal(a, b) for a, b in zip(own, training, strict=True))


@pytest.mark.parametrize("flags", [dict(max_tokens_per_gpu=64), dict(attn_implementation="sdpa")])
def test_the_budget_of_training_and_padded_batches_keep_the_micro_batches(
    llama: Path, flags: dict[str, Any]
) -> None:
    backend = make_backend(make_args(llama, log_probs_max_tokens_per_gpu=64, **flags))
    _, seen = score(backend, whole_batch(make_samples(), micro_batch_size=2))
    assert len(seen) == 8


def test_a_rollout_trains_in_its_own_micro_batches(llama: Path) -> None:
    """Reference and old log-probs are scored in one pack each; the two steps train four
    micro-batches each.
    """
    args = make_args(llama, kl_coef=0.01, kl_loss_type="k3", log_probs_max_tokens_per_gpu=10_000)
    backend = make_backend(args)
    with forwards(backend) as seen:
        metrics, _ = train_on_rollout(
            backend, whole_batch(make_samples(), micro_batch_size=2, steps=2)
        )
    assert len(seen) == 1 + 1 + 2 * 4
    args = make_args(llama, kl_coef=0.01, kl_loss_type="k3")
    plain, _ = train_on_rollout(
        make_backend(args), whole_batch(make_samples(), micro_batch_size=2, steps=2)
    )
    assert metrics["train/loss"] == pytest.approx(plain["train/loss"], abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=1e-5)
