"""Draws follow the distribution, the seed and the filters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_drivers import make
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.plugins.embedded.sampling import inverse_cdf, sample_tokens, token_logprobs, uniforms


def test_uniforms_depend_on_seed_and_step_only() -> None:
    numbers = uniforms([3, 3, 4, -1, 2**63 - 1], [0, 1, 0, 0, 0])
    assert len(set(numbers)) == 5 and ((numbers >= 0) & (numbers < 1)).all()
    assert numbers[1] == uniforms([9, 3], [7, 1])[1]


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    grid = np.array([uniforms([seed] * 400, list(range(400))) for seed in range(200)])
    assert abs(grid.mean() - 0.5) < 0.005 and abs(grid.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(grid[:, 0], grid[:, 1])[0, 1]) < 0.2
    assert abs(np.corrcoef(grid[0], grid[1])[0, 1]) < 0.2


@settings(max_examples=100, deadline=None)
@given(
    vocab=st.integers(1, 700), seed=st.integers(0, 2**31), uniform=st.floats(0, 1, exclude_max=True)
)
def test_inverse_cdf_equals_the_plain_cumulative_sum(vocab: int, seed: int, uniform: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(torch.randn(3, vocab, generator=generator) * 4, -1)
    probs[probs < 0.01 / vocab] = 0.0
    got = inverse_cdf(probs, torch.full((3,), uniform, dtype=torch.float64))
    for row, token in zip(probs.double(), got.tolist(), strict=True):
        assert row[token] > 0
        target = uniform * row.sum()
        below = float(row[:token].sum())
        assert below - 1e-6 <= target <= below + float(row[token]) + 1e-6


def test_inverse_cdf_at_the_edges() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 1.0]])
    assert inverse_cdf(probs, torch.tensor([0.0, 0.0])).tolist() == [1, 3]
    almost = torch.tensor([1 - 1e-16, 1 - 1e-16], dtype=torch.float64)
    assert inverse_cdf(probs, almost).tolist() == [2, 3]


def frequencies(count: int, logits: torch.Tensor, **params: object) -> np.ndarray:
    sequences = [make([1], seed=seed, **params) for seed in range(count)]  # type: ignore[arg-type]
    drawn = sample_tokens(logits.repeat(count, 1), sequences, frozenset())
    return np.bincount([one.token for one in drawn], minlength=logits.shape[0]) / count


LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, -1).numpy()
    np.testing.assert_allclose(
        frequencies(20000, LOGITS, temperature=temperature), expected, atol=0.012
    )


def test_top_k_top_p_and_min_p_renormalise() -> None:
    probs = torch.softmax(LOGITS, -1)

    def only(kept: list[int]) -> np.ndarray:
        mask = torch.zeros(5).index_fill_(0, torch.tensor(kept), 1.0)
        return (probs * mask / (probs * mask).sum()).numpy()

    np.testing.assert_allclose(frequencies(8000, LOGITS, top_k=2), only([0, 4]), atol=0.02)
    assert float(probs[0] + probs[4]) < 0.8 < float(probs[0] + probs[4] + probs[1])
    np.testing.assert_allclose(frequencies(8000, LOGITS, top_p=0.8), only([0, 4, 1]), atol=0.02)
    np.testing.assert_allclose(frequencies(8000, LOGITS, min_p=0.5), only([0, 4]), atol=0.02)
    np.testing.assert_allclose(
        frequencies(8000, LOGITS, top_k=3, top_p=0.5), only([0, 4]), atol=0.02
    )
    assert (
        frequencies(50, LOGITS, top_k=1)[0] == 1.0
        and frequencies(50, LOGITS, temperature=0.0)[0] == 1.0
    )


def test_top_p_beyond_the_candidates_sorts_everything() -> None:
    flat = torch.zeros(3000)
    counts = frequencies(4000, flat, top_p=0.9)
    assert (counts > 0).sum() > 1500


def test_logprobs_are_of_the_whole_distribution_at_the_temperature() -> None:
    sequences = [make([1], temperature=0.7, top_k=2), make([1], temperature=0.0), make([1])]
    logits = torch.randn(3, 50)
    drawn = sample_tokens(logits.clone(), sequences, frozenset())
    for one, row, temperature in zip(drawn, logits, (0.7, 1.0, 1.0), strict=True):
        expected = torch.log_softmax(row / temperature, -1)[one.token]
        assert one.logprob == pytest.approx(float(expected), abs=1e-6)


def test_logprobs_of_hopeless_tokens_are_finite() -> None:
    scores = torch.tensor([[0.0, -300.0]])
    probs = torch.softmax(scores, -1)
    assert probs[0, 1] == 0
    assert token_logprobs(scores, probs, scores.argmax(-1), torch.tensor([1])).tolist() == [-300.0]


def test_penalties_and_bias() -> None:
    sequence = make(
        [7, 3],
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        logit_bias=((4, 1.5),),
    )
    sequence.tokens += [5, 5]
    logits = torch.linspace(-2, 2, 9)
    expected = logits.clone()
    for token in (7, 3, 5):
        expected[token] = expected[token] / 2 if expected[token] > 0 else expected[token] * 2
    expected[5] -= 0.5 * 2 + 0.25
    expected[4] += 1.5
    (one,) = sample_tokens(logits[None].clone(), [sequence], frozenset())
    assert one.logprob == pytest.approx(float(torch.log_softmax(expected, -1)[one.token]), abs=1e-6)


def test_no_end_before_min_new_tokens() -> None:
    logits = torch.zeros(1, 6)
    logits[0, 2] = logits[0, 3] = 50.0
    sequence = make([1], min_new_tokens=1, stop_token_ids=frozenset({3}))
    assert sample_tokens(logits.clone(), [sequence], frozenset({2}))[0].token not in (2, 3)
    sequence.tokens.append(0)
    assert sample_tokens(logits.clone(), [sequence], frozenset({2}))[0].token in (2, 3)


def test_top_logprobs_and_asked_ids() -> None:
    sequence = make([1], top=2)
    sequence.request.token_ids_logprob = [4, 0]
    (one,) = sample_tokens(LOGITS[None].clone(), [sequence], frozenset())
    expected = torch.log_softmax(LOGITS, -1)
    assert [token for _, token in one.top] == [0, 4]
    assert one.chosen == [
        (pytest.approx(float(expected[4])), 4),
        (pytest.approx(float(expected[0])), 0),
    ]
