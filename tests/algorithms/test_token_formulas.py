"""Vectorised formulas against one-token-at-a-time float64 references, in value and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime.algorithms.algorithm import EstimatorSettings
from slime.algorithms.grpo import Cispo, compute_cispo_loss, compute_gspo_kl, sequence_kl
from slime.algorithms.losses import compute_approx_kl, compute_policy_loss, compute_value_loss
from slime.algorithms.off_policy import compute_opsm_mask
from slime.algorithms.sequences import MAX_LOG_RATIO

quick = settings(deadline=None, max_examples=60)

# Steps of 1/16 plus an odd offset: never exactly on a clip boundary, where one-sided gradients
# differ.
numbers = st.integers(-48, 48).map(lambda k: k / 16 + 0.0037)


def vectors(*names: str, largest: int = 12) -> st.SearchStrategy[dict[str, list[float]]]:
    """Equally long lists of numbers, one per name."""
    return st.integers(0, largest).flatmap(
        lambda n: st.fixed_dictionaries(
            {name: st.lists(numbers, min_size=n, max_size=n) for name in names}
        )
    )


def gradients(
    function: Callable[..., Tensor], *inputs: list[float]
) -> tuple[list[float], list[list[float]]]:
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in inputs]
    out = function(*leaves)
    if out.requires_grad:
        out.sum().backward()
    return out.tolist(), [
        (torch.zeros_like(x) if x.grad is None else x.grad).tolist() for x in leaves
    ]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@quick
@given(data=vectors("p", "q"))
def test_kl(kind: str, data: dict[str, list[float]]) -> None:
    values, (grad, _) = gradients(lambda p, q: compute_approx_kl(p, q, kind), data["p"], data["q"])
    for p, q, value, g in zip(data["p"], data["q"], values, grad, strict=True):
        d = p - q
        k3 = math.exp(-d) - 1 + d
        expected, slope = {
            "k1": (d, 1.0),
            "k2": (d * d / 2, d),
            "k3": (k3, 1 - math.exp(-d)),
            "low_var_kl": (min(k3, 10.0), 1 - math.exp(-d) if k3 < 10 else 0.0),
        }[kind]
        assert value == pytest.approx(expected, abs=1e-12)
        assert g == pytest.approx(slope, abs=1e-12)
        assert kind in ("k1",) or value >= 0


@quick
@given(data=vectors("p", "q", "old"))
def test_unbiased_kl_differentiates_the_ratio_too(data: dict[str, list[float]]) -> None:
    def unbiased(p: Tensor, q: Tensor, old: Tensor) -> Tensor:
        return compute_approx_kl(p, q, "k3", (p - old).exp())

    values, (grad, _, _) = gradients(unbiased, data["p"], data["q"], data["old"])
    for p, q, old, value, g in zip(data["p"], data["q"], data["old"], values, grad, strict=True):
        d, ratio = p - q, math.exp(p - old)
        k3 = math.exp(-d) - 1 + d
        assert value == pytest.approx(ratio * k3)
        assert g == pytest.approx(ratio * k3 + ratio * (1 - math.exp(-d)))


def test_unknown_kl_type_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'k4'.*low_var_kl"):
        compute_approx_kl(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize("dual", [None, 3.0])
@quick
@given(data=vectors("kl", "a"))
def test_policy_loss(dual: float | None, data: dict[str, list[float]]) -> None:
    low, high = 0.2, 0.28
    values, (grad, _) = gradients(
        lambda kl, a: compute_policy_loss(kl, a, low, high, dual)[0], data["kl"], data["a"]
    )
    _, clipfrac = compute_policy_loss(
        torch.tensor(data["kl"]), torch.tensor(data["a"]), low, high, dual
    )
    for kl, a, value, g, clipped in zip(
        data["kl"], data["a"], values, grad, clipfrac.tolist(), strict=True
    ):
        ratio = math.exp(-kl)
        plain, bounded = -ratio * a, -min(max(ratio, 1 - low), 1 + high) * a
        expected, slope = (plain, ratio * a) if plain >= bounded else (bounded, 0.0)
        assert clipped == (bounded > plain)
        if dual is not None and a < 0 and expected > -dual * a:
            expected, slope = -dual * a, 0.0
        assert value == pytest.approx(expected)
        assert g == pytest.approx(slope)


@quick
@given(data=vectors("kl", "p", "a"))
def test_cispo(data: dict[str, list[float]]) -> None:
    low, high = 0.5, 1.0
    values, (kl_grad, grad, _) = gradients(
        lambda kl, p, a: compute_cispo_loss(kl, p, a, low, high)[0],
        data["kl"],
        data["p"],
        data["a"],
    )
    _, clipfrac = compute_cispo_loss(
        *(torch.tensor(data[k], dtype=torch.float64) for k in ("kl", "p", "a")), low, high
    )
    assert kl_grad == [0.0] * len(kl_grad)  # the ratio is detached
    for i, (kl, p, a) in enumerate(zip(data["kl"], data["p"], data["a"], strict=True)):
        ratio = math.exp(-kl)
        weight = min(max(ratio, 1 - low), 1 + high)
        assert values[i] == pytest.approx(-weight * a * p)
        assert grad[i] == pytest.approx(-weight * a)
        assert clipfrac[i] == (weight != ratio)


@quick
@given(data=vectors("v", "old", "ret"))
def test_value_loss(data: dict[str, list[float]]) -> None:
    clip = 0.2
    values, (grad, _, _) = gradients(
        lambda v, old, ret: compute_value_loss(v, old, ret, clip)[0],
        data["v"],
        data["old"],
        data["ret"],
    )
    for v, old, ret, value, g in zip(
        data["v"], data["old"], data["ret"], values, grad, strict=True
    ):
        near = old + min(max(v - old, -clip), clip)
        plain, clipped = (v - ret) ** 2, (near - ret) ** 2
        assert value == pytest.approx(max(plain, clipped))
        if abs(v - old) < clip or plain > clipped:
            assert g == pytest.approx(2 * (v - ret))
        elif clipped > plain:
            assert g == 0


def test_gspo_is_deaf_to_masked_tokens() -> None:
    new = torch.tensor([-1.0, -2.0, float("nan")], requires_grad=True)
    old, mask = torch.tensor([-1.5, -1.0, float("-inf")]), torch.tensor([1, 1, 0])
    kl = sequence_kl(new, old, mask, [3])
    assert kl.tolist() == [0.25, 0.25, 0.25]
    kl.sum().backward()
    assert new.grad is not None and new.grad.tolist() == [-1.5, -1.5, 0.0]


sequences = st.lists(
    st.lists(st.tuples(numbers, numbers, numbers, st.booleans()), min_size=1, max_size=6),
    min_size=1,
    max_size=5,
)


@quick
@given(samples=sequences)
def test_gspo_ratio_is_one_mean_per_sequence(
    samples: list[list[tuple[float, float, float, bool]]],
) -> None:
    lengths = [len(s) for s in samples]
    new = torch.tensor([t[0] for s in samples for t in s], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([t[1] for s in samples for t in s], dtype=torch.float64)
    mask = torch.tensor([int(t[3]) for s in samples for t in s])
    kl = sequence_kl(new, old, mask, lengths)
    weight = torch.arange(1.0, len(new) + 1, dtype=torch.float64)
    (kl * weight).sum().backward()

    position, expected, slopes = 0, [], []
    for s in samples:
        count = max(sum(t[3] for t in s), 1)
        mean = sum(t[1] - t[0] for t in s if t[3]) / count
        incoming = sum(float(weight[position + i]) for i in range(len(s)))
        expected += [mean] * len(s)
        slopes += [-incoming / count if t[3] else 0.0 for t in s]
        position += len(s)
    assert kl.tolist() == pytest.approx(expected)
    assert new.grad is not None and new.grad.tolist() == pytest.approx(slopes)
    listed = compute_gspo_kl(
        new.split(lengths), old.split(lengths), new.split(lengths), mask.split(lengths)
    )
    assert torch.equal(listed, kl)


@quick
@given(samples=sequences, delta=st.sampled_from([0.0, 1e-4, 0.5]))
def test_opsm(samples: list[list[tuple[float, float, float, bool]]], delta: float) -> None:
    columns = [
        [torch.tensor([t[i] for t in s], dtype=torch.float64) for s in samples] for i in range(4)
    ]
    keep, dropped = compute_opsm_mask(SimpleNamespace(opsm_delta=delta), *columns[:3], columns[3])
    expected = []
    for s in samples:
        drift = sum(t[1] - t[0] for t in s if t[3]) / max(sum(t[3] for t in s), 1)
        expected += [0.0 if t[2] < 0 and drift > delta else 1.0 for t in s]
    assert keep.tolist() == expected
    assert dropped.tolist() == [1 - x for x in expected]


@pytest.mark.parametrize("shift", [-500.0, 500.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_absurd_ratios_keep_loss_and_gradient_finite(shift: float, advantage: float) -> None:
    new = torch.tensor([shift], requires_grad=True)
    a = torch.tensor([advantage])
    total = (
        compute_policy_loss(-new, a, 0.2, 0.2)[0] + compute_cispo_loss(-new, new, a, 0.2, 0.2)[0]
    )
    for kind in ("k3", "low_var_kl"):
        total = total + compute_approx_kl(new, torch.zeros(1), kind)
    total.sum().backward()
    assert math.isfinite(total.item()) and new.grad is not None and math.isfinite(new.grad.item())
    assert MAX_LOG_RATIO == 20.0


def test_the_runs_cispo_counts_no_clip_where_there_is_no_advantage() -> None:
    """Samples without any advantage may be left out of the step, which must not change the
    metric.
    """
    kl, p = torch.tensor([-2.0, -2.0, 0.0]), torch.zeros(3)
    estimator = Cispo(EstimatorSettings(eps_clip=0.2, eps_clip_high=0.2))
    assert estimator.policy_loss(kl, p, torch.tensor([1.0, 0.0, 1.0]))[1].tolist() == [
        1.0,
        0.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("kind", "unbiased", "regularises"),
    [
        ("k1", False, False),
        ("k1", True, True),
        ("k2", False, True),
        ("k3", False, True),
        ("low_var_kl", False, True),
        ("low_var_kl", True, True),
    ],
)
def test_what_an_estimator_of_the_kl_does_in_the_loss(
    kind: str, unbiased: bool, regularises: bool
) -> None:
    """The exact expectation of the loss's gradient over on-policy samples of six actions."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, generator=generator).requires_grad_()
    reference = torch.randn(6, dtype=torch.float64, generator=generator).log_softmax(0)
    log_p = logits.log_softmax(0)
    (true,) = torch.autograd.grad(
        (log_p.exp() * (log_p - reference)).sum(), logits, retain_graph=True
    )
    ratio = (log_p - log_p.detach()).exp() if unbiased else None
    kl = compute_approx_kl(log_p, reference, kind, ratio)
    (gradient,) = torch.autograd.grad((log_p.exp().detach() * kl).sum(), logits)
    if not regularises:
        torch.testing.assert_close(gradient, torch.zeros_like(gradient))
        return
    assert torch.nn.functional.cosine_similarity(gradient, true, 0) > 0.9
    if kind == "k2" or unbiased:
        torch.testing.assert_close(gradient, true)
