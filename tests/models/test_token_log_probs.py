"""Chunked log-probs against torch's log_softmax in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slime.models import token_log_probs as module
from slime.models.token_log_probs import (
    Nuclei,
    default_chunk_size,
    fused_chunk_size,
    token_log_probs,
)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formulas of the fused path; that they compile is tested with the layers."""
    monkeypatch.setattr(module, "compiled", lambda function: function)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 23),
    chunk=st.sampled_from([-1, 1, 4, 7, 64]),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    entropy_grad=st.booleans(),
    use_bias=st.booleans(),
    fused=st.booleans(),
)
def test_equals_float64(
    rows: int, chunk: int, temperature: float, entropy_grad: bool, use_bias: bool, fused: bool
) -> None:
    g = torch.Generator().manual_seed(rows)
    hidden, weight = torch.randn(rows, 8, generator=g), torch.randn(33, 8, generator=g)
    bias = torch.randn(33, generator=g) if use_bias else None
    targets = torch.randint(33, (rows,), generator=g)
    seeds = torch.randn(2, rows, generator=g)
    inputs = [x.requires_grad_() for x in (hidden, weight, bias) if x is not None]
    got = token_log_probs(
        hidden,
        weight,
        targets,
        temperature,
        bias=bias,
        chunk_size=chunk,
        with_entropy=True,
        entropy_grad=entropy_grad,
        fused=fused,
    )
    assert got.entropy is not None
    assert got.entropy.requires_grad == entropy_grad
    exact = [x.detach().double().requires_grad_() for x in inputs]
    log_p = (torch.nn.functional.linear(*exact) / temperature).log_softmax(-1)
    want = log_p.gather(-1, targets[:, None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(got.log_probs.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.entropy.double(), entropy, rtol=1e-5, atol=5e-5)
    loss, exact_loss = (got.log_probs * seeds[0]).sum(), (want * seeds[0]).sum()
    if entropy_grad:
        loss, exact_loss = (
            loss + (got.entropy * seeds[1]).sum(),
            exact_loss + (entropy * seeds[1]).sum(),
        )
    for a, b in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(exact_loss, exact), strict=True
    ):
        # of float32, in sums of terms as large as these
        rounding = 2e-5 * max([1.0, *b.abs().flatten().tolist()])
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=rounding)


def test_no_entropy_unless_asked_and_no_graph_without_grad() -> None:
    with torch.no_grad():
        scores = token_log_probs(
            torch.randn(3, 4), torch.randn(5, 4, requires_grad=True), torch.tensor([0, 1, 4])
        )
    assert scores.entropy is None
    assert not scores.log_probs.requires_grad


@pytest.mark.parametrize("fused", [False, True])
def test_bfloat16_scores_are_float32(fused: bool) -> None:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 16, generator=g).bfloat16().requires_grad_()
    weight = torch.randn(50, 16, generator=g).bfloat16().requires_grad_()
    targets = torch.randint(50, (9,), generator=g)
    scores = token_log_probs(hidden, weight, targets, chunk_size=4, fused=fused)
    assert scores.log_probs.dtype == torch.float32
    scores.log_probs.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    want = (exact[0] @ exact[1].t()).log_softmax(-1).gather(-1, targets[:, None]).sum()
    want.backward()
    torch.testing.assert_close(weight.grad.double(), exact[1].grad, rtol=0.03, atol=0.03)  # type: ignore[union-attr]


def test_only_one_chunk_of_logits_is_kept() -> None:
    rows, vocab, chunk = 64, 1000, 16
    hidden, weight = (
        torch.randn(rows, 4, requires_grad=True),
        torch.randn(vocab, 4, requires_grad=True),
    )
    scores = token_log_probs(hidden, weight, torch.zeros(rows, dtype=torch.long), chunk_size=chunk)
    saved = scores.log_probs.grad_fn.saved_tensors  # type: ignore[union-attr]
    logits = [t for t in saved if t is not None and t.shape[-1] == vocab and t is not weight]
    assert sum(t.numel() for t in logits) <= chunk * vocab


@pytest.mark.parametrize("vocab", [32, 49152, 262144])
def test_default_chunk_is_bounded(vocab: int) -> None:
    size = default_chunk_size(vocab)
    assert size >= 64
    assert size == 64 or size * vocab * 4 <= 256 * 1024 * 1024


def test_fused_chunks_are_whole_tiles() -> None:
    assert fused_chunk_size(151936, 2) == 3456
    assert fused_chunk_size(151936, 2, kept=True) == 14080
    assert fused_chunk_size(10**9, 2) == 128


@settings(max_examples=40, deadline=None)
@example(
    sizes=[0, 0, 0, 0, 0, 0, 0, 3, 5],
    chunk=-1,
    temperature=0.6,
    use_bias=True,
    dtype=torch.bfloat16,
)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=9),
    chunk=st.sampled_from([-1, 1, 4]),
    temperature=st.sampled_from([1.0, 0.6]),
    use_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_nuclei_restrict_log_probs_but_not_the_entropy(
    sizes: list[int], chunk: int, temperature: float, use_bias: bool, dtype: torch.dtype
) -> None:
    """Against log_softmax over each row's own list in float64; a row without one is whole."""
    rows, vocab = len(sizes), 33
    g = torch.Generator().manual_seed(sum(sizes))
    hidden, weight = (torch.randn(n, 8, generator=g).to(dtype) for n in (rows, vocab))
    bias = torch.randn(vocab, generator=g).to(dtype) if use_bias else None
    targets, seeds = torch.randint(vocab, (rows,), generator=g), torch.randn(rows, generator=g)
    lists = [
        [*torch.randperm(vocab, generator=g)[: n - 1].tolist(), t] if n else []
        for n, t in zip(sizes, targets.tolist(), strict=True)
    ]
    offsets = [0]
    for one in lists:
        offsets.append(offsets[-1] + len(one))
    nuclei = Nuclei(
        torch.tensor([token for one in lists for token in one], dtype=torch.int64), offsets
    )
    inputs = [x.requires_grad_() for x in (hidden, weight, bias) if x is not None]
    got = token_log_probs(
        hidden,
        weight,
        targets,
        temperature,
        bias=bias,
        chunk_size=chunk,
        with_entropy=True,
        nuclei=nuclei,
    )
    exact = [x.detach().double().requires_grad_() for x in inputs]
    z = torch.nn.functional.linear(*exact) / temperature
    want = torch.stack([
        row[t] - (row[sorted(set(one))] if one else row).logsumexp(0)
        for row, t, one in zip(z, targets.tolist(), lists, strict=True)
    ])  # fmt: skip
    log_p = z.log_softmax(-1)
    close = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=0.05, atol=0.05)
    torch.testing.assert_close(got.log_probs.double(), want, **close)
    assert got.entropy is not None
    torch.testing.assert_close(
        got.entropy.double(), -(log_p.exp() * log_p).sum(-1).detach(), **close
    )
    mine = torch.autograd.grad((got.log_probs * seeds).sum(), inputs)
    for a, b in zip(mine, torch.autograd.grad((want * seeds).sum(), exact), strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(a.double(), b, **close)
        # as a whole: a single element is a sum, whose rounding can be larger than 5% of it, also in
        # plain torch
        else:
            assert (a.double() - b).norm() <= 0.03 * b.norm() + 1e-6
