"""Divergences from a teacher beside plain sums in float64, and by numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from slime.plugins.distillation import DIVERGENCES
from slime.plugins.distillation.divergence import distilled


def probabilities(logits: list[float]) -> list[float]:
    total = math.fsum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


def plain(s: list[float], t: list[float], kind: str) -> float:
    """The divergence of two distributions, as a sum."""
    m = [(a + b) / 2 for a, b in zip(s, t, strict=True)]
    kl = lambda p, q: math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))  # noqa: E731
    return {
        "reverse_kl": kl(s, t),
        "forward_kl": kl(t, s),
        "jsd": (kl(s, m) + kl(t, m)) / 2,
    }[kind]


def of_top(s: list[float], t: list[float], kind: str, k: int) -> float:
    """The same of the k likeliest tokens and all others as one."""
    chooser = t if kind == "forward_kl" else s
    kept = sorted(range(len(s)), key=lambda v: -chooser[v])[:k]
    merged = [[p[v] for v in kept] + [1 - math.fsum(p[v] for v in kept)] for p in (s, t)]
    return plain(*merged, kind)


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("top_k", [0, 1, 3, 7])
def test_it_is_the_sum(kind: str, top_k: int) -> None:
    generator = torch.Generator().manual_seed(3)
    student, teacher = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64) * 2
    expected = [
        of_top(s, t, kind, top_k) if 0 < top_k < 7 else plain(s, t, kind)
        for s, t in zip(
            map(probabilities, student.tolist()), map(probabilities, teacher.tolist()), strict=True
        )
    ]
    assert distilled(student, teacher, kind, top_k).tolist() == pytest.approx(expected, rel=1e-12)


def test_by_hand() -> None:
    # s = (3/4, 1/4), t = (1/2, 1/2)
    student, teacher = torch.tensor([[math.log(3.0), 0.0]]), torch.zeros(1, 2)
    # 3/4 ln(3/2) + 1/4 ln(1/2), and 1/2 ln(2/3) + 1/2 ln 2
    assert distilled(student, teacher, "reverse_kl").item() == pytest.approx(0.130812, abs=1e-6)
    assert distilled(student, teacher, "forward_kl").item() == pytest.approx(0.143841, abs=1e-6)
    # m = (5/8, 3/8): 1/2 (3/4 ln 6/5 + 1/4 ln 2/3) + 1/2 (1/2 ln 4/5 + 1/2 ln 4/3)
    assert distilled(student, teacher, "jsd").item() == pytest.approx(0.033822, abs=1e-6)


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("top_k", [0, 2])
def test_the_gradient_is_that_of_the_sum(kind: str, top_k: int) -> None:
    generator = torch.Generator().manual_seed(5)
    student, teacher = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: distilled(x, teacher, kind, top_k), student.requires_grad_()
    )
    # A step along it brings the student to the teacher.
    with torch.no_grad():
        before = distilled(student, teacher, kind, top_k)
    (gradient,) = torch.autograd.grad(distilled(student, teacher, kind, top_k).sum(), [student])
    after = distilled(student - 0.1 * gradient, teacher, kind, top_k)
    assert bool((after < before).all())


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_columns_that_only_pad_do_not_count(kind: str) -> None:
    generator = torch.Generator().manual_seed(6)
    student, teacher = torch.randn(2, 4, 5, generator=generator)
    padded = torch.cat([teacher, torch.full((4, 3), 9.0)], -1)
    assert torch.equal(distilled(student, padded, kind), distilled(student, teacher, kind))
    assert distilled(student, student, kind).abs().max() < 1e-6


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_certain_distributions_are_finite(kind: str) -> None:
    certain = torch.tensor([[80.0, 0.0, 0.0, 0.0]], requires_grad=True)
    other = torch.tensor([[0.0, 80.0, 0.0, 0.0]])
    for top_k in (0, 1, 2):
        value = distilled(certain, other, kind, top_k)
        (gradient,) = torch.autograd.grad(value.sum(), [certain])
        assert bool(value.isfinite().all()) and bool(gradient.isfinite().all())
