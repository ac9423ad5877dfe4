"""The token budget of a micro-batch: arithmetic, agreement of ranks, and a rehearsal that leaves no
trace.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_helpers import make_args, make_backend, make_samples, save_tiny_llama, whole_batch
from hypothesis import given
from hypothesis import strategies as st

from slime.backends import token_budget
from slime.backends.token_budget import (
    FIRST_SIZE,
    LEAST_TOKENS,
    MOST_TOKENS,
    MULTIPLE,
    Measurement,
    budget,
    fit,
    measure,
)
from slime.backends.train_loop import train_on_rollout


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@given(per_token=st.integers(2, 10**7), fixed=st.integers(0, 10**11), usable=st.integers(0, 10**12))
def test_a_line_through_two_peaks(per_token: int, fixed: int, usable: int) -> None:
    found = fit(
        {4096: fixed + 4096 * per_token, 8192: fixed + 8192 * per_token}, idle=0, usable=usable
    )
    assert found.bytes_per_token == per_token
    assert found.tokens == max((usable - fixed) // per_token, 0)
    assert found.bytes_for_tokens == max(usable - fixed, 0)


def test_one_peak_counts_all_above_idle_memory_as_tokens() -> None:
    assert fit({1000: 7000}, idle=2000, usable=12_000).tokens == 2000


def test_peaks_that_do_not_grow_allow_any_number() -> None:
    assert fit({1000: 500, 2000: 400}, idle=100, usable=10**6).tokens > 900_000


def found(tokens: int) -> Measurement:
    return Measurement(tokens, 1.0, float(tokens))


@pytest.mark.parametrize(
    "tokens, longest, expected",
    [
        ([20_000, 10_000, 30_000], 4096, 9984),  # the rank with the least room, down to a multiple
        ([10**6], 4096, MOST_TOKENS),
        ([10**6], 100_000, 99_840),  # a long sample has to fit
        ([80_000], 100_000, 79_872),
        ([0, 10**6], 4096, LEAST_TOKENS),
    ],
)
def test_ranks_agree_on_the_least(tokens: list[int], longest: int, expected: int) -> None:
    assert budget([found(n) for n in tokens], longest) == expected
    assert expected % MULTIPLE == 0


class TokenMeter:
    """Memory that grows with the tokens that the backend really runs."""

    def __init__(self, backend: Any, fixed: int, per_token: int, available: int) -> None:
        self.fixed, self.per_token, self.total, self.most = fixed, per_token, available, 0
        self.sizes: list[int] = []
        backend.scorer.register_forward_pre_hook(self._note)

    def _note(self, module: Any, given: Any) -> None:
        self.sizes.append(given[0].kwargs["input_ids"].numel())
        self.most = max(self.most, self.fixed + self.per_token * self.sizes[-1])

    def available(self) -> int:
        return self.total

    def allocated(self) -> int:
        return self.fixed

    def start(self) -> None:
        self.most = 0

    def peak(self) -> int:
        return self.most


@pytest.mark.parametrize(
    "available, sizes, expected",
    [
        (10_000_000, [64, 64, 64, 64, 128, 128, 128, 128], (8_000_000 - 5000) // 100),
        # twice as many tokens might not fit: not tried
        (17_000, [64, 64, 64, 64], (13_600 - 5000) // 100),
    ],
)
def test_measured_by_passes_of_the_backend(
    llama: Path, monkeypatch: pytest.MonkeyPatch, available: int, sizes: list[int], expected: int
) -> None:
    monkeypatch.setattr(token_budget, "FIRST_SIZE", 64)
    backend = make_backend(make_args(llama))
    meter = TokenMeter(backend, fixed=5000, per_token=100, available=available)
    measured = measure(backend, 0.8, meter)
    assert meter.sizes == sizes
    assert measured.tokens == expected and measured.bytes_per_token == 100


def test_a_pack_that_does_not_fit_names_the_flags(llama: Path) -> None:
    backend = make_backend(make_args(llama))

    def full(module: Any, given: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    backend.scorer.register_forward_pre_hook(full)
    with pytest.raises(MemoryError, match="--max-tokens-per-gpu"):
        measure(backend, 0.8, TokenMeter(backend, 0, 1, 1))


def test_the_first_pack_is_no_larger_than_the_smallest_default() -> None:
    from slime.config.layout import MIN_TOKEN_BUDGET

    assert FIRST_SIZE == MIN_TOKEN_BUDGET


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_rehearsal_leaves_no_trace(llama: Path, role: str) -> None:
    flags: dict[str, Any] = (
        dict(advantage_estimator="ppo") if role == "critic" else dict(entropy_coef=0.01)
    )
    plain, rehearsed = (make_backend(make_args(llama, **flags), role) for _ in range(2))
    state = torch.get_rng_state()
    rehearsed.rehearse(200)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for _, p in rehearsed.named_parameters)
    for seed in (0, 1):
        for backend in (plain, rehearsed):
            train_on_rollout(backend, whole_batch(make_samples(seed=seed)))
    pairs = zip(rehearsed.named_parameters, plain.named_parameters, strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
