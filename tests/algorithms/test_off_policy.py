"""TIS, IcePop and MIS against a reference that walks over samples and tokens one at a time."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.algorithms.mis import MisConfig, compute_mis_weights, mean_weight
from slime.algorithms.off_policy import icepop_function, vanilla_tis_function
from slime.algorithms.sequences import Identity

quick = settings(deadline=None, max_examples=60)

numbers = st.integers(-40, 40).map(lambda k: k / 16 + 0.0037)
samples_strategy = st.lists(
    st.lists(st.tuples(numbers, numbers, numbers, st.booleans()), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)
Samples = list[list[tuple[float, float, float, bool]]]  # (train, rollout, pg_loss, mask)


def hook_inputs(samples: Samples, **args: Any) -> dict[str, Any]:
    columns = [
        [torch.tensor([t[i] for t in s], dtype=torch.float64) for s in samples] for i in range(3)
    ]
    lengths = [len(s) for s in samples]
    return dict(
        args=SimpleNamespace(**({"tis_clip": 2.0, "tis_clip_low": 0.0} | args)),
        pg_loss=torch.cat(columns[2]),
        train_log_probs=columns[0],
        rollout_log_probs=columns[1],
        loss_masks=[torch.tensor([int(t[3]) for t in s], dtype=torch.int32) for s in samples],
        total_lengths=[n + 3 for n in lengths],
        response_lengths=lengths,
    )


def unmasked(samples: Samples, flat: list[float]) -> list[float]:
    return [x for x, keep in zip(flat, (t[3] for s in samples for t in s), strict=True) if keep]


@quick
@given(samples=samples_strategy, low=st.sampled_from([0.0, 0.5]))
def test_tis_and_icepop(samples: Samples, low: float) -> None:
    inputs = hook_inputs(samples, tis_clip_low=low, tis_clip=1.5)
    ratios = unmasked(samples, [math.exp(t[0] - t[1]) for s in samples for t in s])
    losses = unmasked(samples, [t[2] for s in samples for t in s])
    for function, weigh in (
        (vanilla_tis_function, lambda r: min(max(r, low), 1.5)),
        (icepop_function, lambda r: r if low <= r <= 1.5 else 0.0),
    ):
        loss, masks, metrics = function(**inputs)
        assert unmasked(samples, loss.tolist()) == pytest.approx(
            [x * weigh(r) for x, r in zip(losses, ratios, strict=True)]
        )
        assert all(torch.equal(a, b) for a, b in zip(masks, inputs["loss_masks"], strict=True))
        assert unmasked(samples, metrics["tis"].tolist()) == pytest.approx(ratios)
        assert unmasked(samples, metrics["tis_abs"].tolist()) == pytest.approx(
            [abs(r - 1) for r in ratios]
        )
        assert unmasked(samples, metrics["tis_clipfrac"].tolist()) == [
            float(weigh(r) != r) for r in ratios
        ]


def reference_mis(samples: Samples, a: SimpleNamespace) -> tuple[list[float], list[float]]:
    """Weights (before batch normalisation) and masks, flat."""
    upper = getattr(a, "tis_upper_bound", 2.0)
    lower = getattr(a, "tis_lower_bound", 1 / upper)
    weights, masks = [], []
    for s in samples:
        d = [t[0] - t[1] if t[3] else 0.0 for t in s]
        count = max(sum(t[3] for t in s), 1)

        def ratio(level: str, t: int, d: list[float] = d, count: int = count) -> float:
            log = {"token": d[t], "sequence": sum(d), "geometric": sum(d) / count}[level]
            return math.exp(min(max(log, -20), 20))

        vetoed = (
            any(t[3] and x < math.log(a.rs_veto_threshold) for t, x in zip(s, d, strict=True))
            if a.rs_veto_threshold
            else False
        )
        for t in range(len(s)):
            w, m = ratio(a.tis_level, t), float(s[t][3])
            if a.tis_mode == "mask":
                m *= lower <= w <= upper
            elif a.tis_mode == "truncate":
                w = min(w, upper)
            else:
                w = min(max(w, lower), upper)
            if a.use_rs:
                r = ratio(getattr(a, "rs_level", a.tis_level), t)
                m *= getattr(a, "rs_lower_bound", lower) <= r <= getattr(a, "rs_upper_bound", upper)
            weights.append(w)
            masks.append(0.0 if vetoed else m)
    return weights, masks


settings_strategy = st.fixed_dictionaries(
    {
        "tis_level": st.sampled_from(["token", "sequence", "geometric"]),
        "tis_mode": st.sampled_from(["truncate", "clip", "mask"]),
        "use_rs": st.booleans(),
        "rs_veto_threshold": st.sampled_from([None, 0.2]),
        "tis_upper_bound": st.sampled_from([1.7, 3.1]),
    },
    optional={
        "tis_lower_bound": st.just(0.31),
        "rs_level": st.sampled_from(["token", "sequence", "geometric"]),
        "rs_lower_bound": st.just(0.11),
        "rs_upper_bound": st.just(5.3),
    },
)


@quick
@given(samples=samples_strategy, config=settings_strategy, normalize=st.booleans())
def test_mis(samples: Samples, config: dict[str, Any], normalize: bool) -> None:
    inputs = hook_inputs(samples, use_tis=True, tis_batch_normalize=normalize, **config)
    loss, masks, metrics = compute_mis_weights(**inputs)
    weights, expected_masks = reference_mis(samples, inputs["args"])
    assert torch.cat(masks).tolist() == expected_masks
    assert [m.dtype for m in masks] == [torch.int32] * len(samples)
    if normalize:
        tis_only = SimpleNamespace(
            **(vars(inputs["args"]) | {"use_rs": False, "rs_veto_threshold": None})
        )
        _, kept = reference_mis(samples, tis_only)
        total = sum(w * m for w, m in zip(weights, kept, strict=True))
        mean = total / sum(kept) if total else 1.0
        weights = [w / mean for w in weights]
    losses = unmasked(
        samples, [t[2] * w for t, w in zip((t for s in samples for t in s), weights, strict=True)]
    )
    assert unmasked(samples, loss.tolist()) == pytest.approx(losses)
    for name, metric in metrics.items():
        assert metric.shape == loss.shape, name
        assert torch.isfinite(metric).all(), name
    train_ppl = [
        math.exp(-sum(t[0] for t in s if t[3]) / max(sum(t[3] for t in s), 1))
        for s in samples
        for _ in s
    ]
    assert metrics["mis_train_ppl"].tolist() == pytest.approx(train_ppl)


def test_mis_diagnostics_by_hand() -> None:
    """π_train / π_rollout is 2 and 1/4 on the two tokens of a sequence."""
    samples: Samples = [
        [(-1.0, -1.0 - math.log(2), 1.0, True), (-3.0, -3.0 + math.log(4), 1.0, True)]
    ]
    _, _, metrics = compute_mis_weights(**hook_inputs(samples))
    assert metrics["mis_kl"].tolist() == pytest.approx([-math.log(2), math.log(4)])
    assert metrics["mis_k3_kl"].tolist() == pytest.approx(
        [2 - 1 - math.log(2), 1 / 4 - 1 + math.log(4)]
    )
    assert metrics["mis_chi2_token"].tolist() == pytest.approx([4 - 1, 1 / 16 - 1])
    assert metrics["mis_chi2_seq"].tolist() == pytest.approx([1 / 4 - 1] * 2)
    assert metrics["mis_train_ppl"].tolist() == pytest.approx([math.exp(2)] * 2)
    assert metrics["mis_rollout_ppl"].tolist() == pytest.approx([math.exp(2 - math.log(2) / 2)] * 2)
    assert metrics["mis_log_ppl_diff"].tolist() == pytest.approx([math.log(2) / 2] * 2)


def test_the_bounds_themselves_are_inside() -> None:
    ones: Samples = [[(-1.0, -1.0, 1.0, True)]]
    for low, high in ((0.5, 1.0), (1.0, 2.0)):
        loss, *_ = icepop_function(**hook_inputs(ones, tis_clip_low=low, tis_clip=high))
        assert loss.tolist() == [1.0]


def test_metrics_alone_need_none_of_the_settings() -> None:
    """``--get-mismatch-metrics`` without a YAML (trap 14)."""
    samples: Samples = [[(-1.0, -1.5, 1.0, True), (-2.0, -2.0, 2.0, True)]]
    inputs = hook_inputs(samples)
    loss, masks, metrics = compute_mis_weights(**inputs)
    assert torch.equal(loss, inputs["pg_loss"]) and torch.equal(masks[0], inputs["loss_masks"][0])
    assert {"mis_kl", "mis_k3_kl", "mis_train_ppl", "mis_chi2_seq"} <= set(metrics)
    assert "mis_weight" not in metrics


def test_a_given_mean_replaces_the_one_over_this_micro_batch() -> None:
    samples: Samples = [[(-1.0, -1.5, 1.0, True)]]
    inputs = hook_inputs(samples, use_tis=True, tis_batch_normalize=True)
    assert compute_mis_weights(**inputs)[0].item() == pytest.approx(1.0)
    assert compute_mis_weights(**inputs, weight_mean=0.5)[0].item() == pytest.approx(
        math.exp(0.5) / 0.5
    )


def test_mean_weight_counts_unmasked_tokens_of_all_ranks() -> None:
    class TwoRanks(Identity):
        def over_data(self, x: torch.Tensor) -> torch.Tensor:
            # the other rank: weights sum to 6 over 2 tokens
            return x + torch.tensor([6.0, 2.0], dtype=x.dtype)

    config = MisConfig.from_args(SimpleNamespace(use_tis=True, tis_upper_bound=8.0))
    d, mask = torch.tensor([math.log(2.0), 0.0]), torch.tensor([1.0, 0.0])
    assert mean_weight(config, d, mask, [2], TwoRanks()) == pytest.approx((2 + 6) / (1 + 2))
    assert mean_weight(config, d, torch.zeros(2), [2], Identity()) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tis_level": "word"}, "tis_level is 'word'.*geometric"),
        ({"tis_mode": "cut"}, "tis_mode is 'cut'.*truncate"),
        ({"tis_lower_bound": 3.0}, r"tis_lower_bound 3.0.*tis_upper_bound"),
        ({"tis_upper_bound": 0}, "tis_upper_bound is 0"),
        ({"rs_veto_threshold": 0.0}, "rs_veto_threshold"),
    ],
)
def test_bad_settings_say_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MisConfig.from_args(SimpleNamespace(tis_clip=2.0, **changes))


def test_numbers_that_yaml_reads_as_text() -> None:
    config = MisConfig.from_args(
        SimpleNamespace(**yaml.safe_load("{tis_upper_bound: 2e1, rs_veto_threshold: 1e-4}"))
    )
    assert (config.tis_upper, config.veto) == (20.0, 1e-4)


def test_masked_tokens_may_hold_anything() -> None:
    nan, inf = float("nan"), float("-inf")
    samples: Samples = [[(-1.0, -1.5, 1.0, True), (nan, inf, nan, False)]]
    clean: Samples = [[(-1.0, -1.5, 1.0, True), (0.0, 0.0, 0.0, False)]]
    everything = dict(use_tis=True, use_rs=True, tis_level="sequence", rs_veto_threshold=0.01)
    for function in (vanilla_tis_function, icepop_function, compute_mis_weights):
        dirty, expected = (
            function(**hook_inputs(samples, **everything)),
            function(**hook_inputs(clean, **everything)),
        )
        assert dirty[0][0] == expected[0][0]
        assert all(torch.isfinite(x[0]) for x in dirty[2].values())
