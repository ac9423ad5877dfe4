"""Advantages: each estimator against a serial reference, and what surrounds them."""

from __future__ import annotations

import statistics
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime.algorithms.algorithm import EstimatorSettings
from slime.algorithms.baselines import centred, overlong_penalty, standardized
from slime.algorithms.gae import get_advantages_and_returns_batch
from slime.algorithms.grpo import leave_one_out
from slime.algorithms.reinforce_plus_plus import (
    get_reinforce_plus_plus_returns,
    normalize_advantages,
)
from slime.algorithms.sequences import Identity, scan_from_end
from slime.backends import advantages
from slime.backends.advantages import AdvantageSettings
from slime.config.algorithm import algorithm_class
from slime.config.args import Args
from slime.data.fields import RankBatch
from tests.every_algorithm import ALGORITHMS
from tests.make_args import make_args

quick = settings(deadline=None, max_examples=40)


def compute_advantages(args: Args, batch: dict[str, Any], reduce: Any) -> None:
    advantages.compute_advantages(AdvantageSettings.from_args(args), batch, reduce)


def make_batch(lengths: list[int], seed: int = 0, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> list[Tensor]:
        return [-torch.rand(n, generator=generator, dtype=torch.float64) for n in lengths]

    return {
        "tokens": [torch.zeros(n + 2, dtype=torch.int64) for n in lengths],
        "response_lengths": list(lengths),
        "total_lengths": [n + 2 for n in lengths],
        "loss_masks": [torch.ones(n, dtype=torch.int32) for n in lengths],
        "rewards": [float(x) for x in torch.rand(len(lengths), generator=generator)],
        "log_probs": draw(),
        "ref_log_probs": draw(),
        "rollout_log_probs": draw(),
        "teacher_log_probs": draw(),
        "values": draw(),
        "squared_probs": [x.exp() for x in draw()],
        "group_indices": list(range(len(lengths))),
    } | changes


# --- scans -------------------------------------------------------------------------------------


@quick
@given(
    length=st.integers(0, 400),
    batch=st.integers(1, 4),
    factor=st.sampled_from([0.0, 0.5, 0.95, 0.999, 1.0]),
    chunk=st.sampled_from([1, 7, 128]),
)
def test_scan_equals_the_serial_recurrence(
    length: int, batch: int, factor: float, chunk: int
) -> None:
    x = torch.randn(
        batch, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64
    )
    expected = torch.zeros_like(x)
    running = torch.zeros(batch, dtype=torch.float64)
    for t in reversed(range(length)):
        running = x[:, t] + factor * running
        expected[:, t] = running
    torch.testing.assert_close(scan_from_end(x, factor, chunk), expected, rtol=1e-11, atol=1e-11)


@quick
@given(
    lengths=st.lists(st.integers(0, 300), min_size=0, max_size=5),
    gamma=st.sampled_from([1.0, 0.99, 0.5]),
    lambd=st.sampled_from([1.0, 0.95, 0.0]),
)
def test_gae(lengths: list[int], gamma: float, lambd: float) -> None:
    batch = make_batch(lengths, seed=len(lengths))
    values, rewards = batch["values"], batch["log_probs"]
    for chunked in (True, False):
        advantages, returns = get_advantages_and_returns_batch(
            batch["total_lengths"], lengths, values, rewards, gamma, lambd, chunked
        )
        assert [len(a) for a in advantages] == lengths
        for v, r, a, ret in zip(values, rewards, advantages, returns, strict=True):
            running, following = 0.0, 0.0
            for t in reversed(range(len(v))):
                running = float(r[t]) + gamma * following - float(v[t]) + gamma * lambd * running
                following = float(v[t])
                assert float(a[t]) == pytest.approx(running, abs=1e-9)
                assert float(ret[t]) == pytest.approx(running + following, abs=1e-9)


def test_gae_wants_whole_responses() -> None:
    with pytest.raises(ValueError, match="whole responses"):
        get_advantages_and_returns_batch([5], [3], [torch.zeros(2)], [torch.zeros(2)], 1.0, 1.0)


@quick
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    gamma=st.sampled_from([1.0, 0.9]),
    seed=st.integers(0, 9),
)
def test_reinforce_plus_plus(lengths: list[int], gamma: float, seed: int) -> None:
    batch = make_batch(lengths, seed)
    masks = [
        (torch.rand(n, generator=torch.Generator().manual_seed(seed + n)) < 0.6).int()
        for n in lengths
    ]
    returns = get_reinforce_plus_plus_returns(
        batch["rewards"], batch["log_probs"], masks, lengths, batch["total_lengths"], 0.3, gamma
    )
    for reward, kl, mask, actual in zip(
        batch["rewards"], batch["log_probs"], masks, returns, strict=True
    ):
        unmasked = [t for t in range(len(mask)) if mask[t]]
        running = 0.0
        for t in reversed(unmasked):
            running = -0.3 * float(kl[t]) + gamma * running + (reward if t == unmasked[-1] else 0.0)
            assert float(actual[t]) == pytest.approx(running, abs=1e-9)
        assert actual[mask == 0].abs().sum() == 0  # also of a removed sample: nothing, and no crash


# --- compute_advantages ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "rloo", "dr_grpo"])
def test_group_estimators_spread_the_reward_and_ignore_kl_in_the_reward(name: str) -> None:
    batch = make_batch([3, 1])
    compute_advantages(make_args(advantage_estimator=name, kl_coef=0.5), batch, Identity())
    for reward, a, r in zip(batch["rewards"], batch["advantages"], batch["returns"], strict=True):
        assert a.tolist() == r.tolist() == pytest.approx([reward] * len(a))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_class_says_whether_the_kl_in_the_reward_and_the_size_of_the_group_matter(
    name: str,
) -> None:
    batches = [make_batch([3, 1]), make_batch([3, 1])]
    for batch, coefficient in zip(batches, (0.0, 0.5), strict=True):
        compute_advantages(
            make_args(advantage_estimator=name, kl_coef=coefficient), batch, Identity()
        )
    changed = not torch.equal(batches[0]["advantages"][0], batches[1]["advantages"][0])
    assert changed is ALGORITHMS[name].uses_kl_in_reward
    trains_alone = (
        ALGORITHMS[name](EstimatorSettings(std_normalization=False)).group_baseline([2.0])[0] != 0
    )
    assert trains_alone is not ALGORITHMS[name].needs_group


@pytest.mark.parametrize("name", sorted({*ALGORITHMS} - {"clip_cov", "kl_cov", "otb"}))
def test_absent_log_probs_are_no_error_without_kl(name: str) -> None:
    """The default single-step run reuses the current log-probs, so the batch has none (trap 3)."""
    batch = make_batch([4, 2])
    for key in ("log_probs", "ref_log_probs", "rollout_log_probs", "teacher_log_probs"):
        del batch[key]
    compute_advantages(make_args(advantage_estimator=name), batch, Identity())
    assert [k.tolist() for k in batch["kl"]] == [[0.0] * 4, [0.0] * 2]
    assert [len(a) for a in batch["advantages"]] == [4, 2]


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        (dict(kl_coef=0.1), "log_probs"),
        (dict(kl_coef=0.1), "ref_log_probs"),
        (dict(use_opd=True), "teacher_log_probs"),
        (dict(use_opd=True), "log_probs"),
        (dict(advantage_estimator="ppo"), "values"),
    ],
)
def test_an_entry_that_is_needed_and_absent_is_named(changes: dict[str, Any], missing: str) -> None:
    batch = make_batch([2])
    del batch[missing]
    with pytest.raises(ValueError, match=missing):
        compute_advantages(make_args(**changes), batch, Identity())


def test_kl_in_the_reward_takes_the_log_probs_that_training_will_use() -> None:
    for use_rollout, key in ((False, "log_probs"), (True, "rollout_log_probs")):
        batch = make_batch([3])
        args = make_args(
            advantage_estimator="reinforce_plus_plus_baseline",
            kl_coef=0.5,
            use_rollout_logprobs=use_rollout,
        )
        compute_advantages(args, batch, Identity())
        expected = batch["rewards"][0] - 0.5 * (batch[key][0] - batch["ref_log_probs"][0])
        torch.testing.assert_close(batch["advantages"][0], expected)


@pytest.mark.parametrize("garbage", [0.0, 5.0, float("nan")])
def test_ppo_runs_over_trained_tokens_only(garbage: float) -> None:
    """Worked by hand, gamma 0.5, lambda 0.5, V = 0.2, 0.4, 0.6 on the tokens of two turns around a
    tool's output:
    deltas 0.5·0.4 − 0.2 = 0, 0.5·0.6 − 0.4 = −0.1, 1 − 0.6 = 0.4; from the end 0.4, −0.1 + 0.25·0.4
    = 0, 0."""
    batch = make_batch([6], loss_masks=[torch.tensor([1, 1, 0, 0, 1, 0], dtype=torch.int32)])
    batch["rewards"] = [1.0]
    batch["values"] = [torch.tensor([0.2, 0.4, garbage, garbage, 0.6, garbage])]
    compute_advantages(
        make_args(advantage_estimator="ppo", gamma=0.5, lambd=0.5), batch, Identity()
    )
    assert batch["advantages"][0].tolist() == pytest.approx(
        [0.0, 0.0, 0.0, 0.0, 0.4, 0.0], abs=1e-7
    )
    assert batch["returns"][0].tolist() == pytest.approx([0.2, 0.4, 0.0, 0.0, 1.0, 0.0])


@quick
@given(data=st.data(), name=st.sampled_from(["ppo", "reinforce_plus_plus"]))
def test_masked_tokens_change_nothing_for_trained_ones(data: st.DataObject, name: str) -> None:
    """A response with a tool's output inside has the advantages of the same response without it."""
    mask = torch.tensor(
        data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=30)), dtype=torch.int32
    )
    args = make_args(advantage_estimator=name, gamma=0.9, lambd=0.8, kl_coef=0.1)
    whole = make_batch([len(mask)], seed=int(mask.sum()), loss_masks=[mask])
    keep = mask.bool()
    names = ("values", "log_probs", "ref_log_probs", "loss_masks")
    short = {name: [x[keep] for x in whole[name]] for name in names}
    count = int(mask.sum())
    short |= dict(rewards=whole["rewards"], response_lengths=[count], total_lengths=[2 + count])
    for batch in (whole, short):
        compute_advantages(args, batch, Identity())
    for key in ("advantages", "returns"):
        torch.testing.assert_close(whole[key][0][keep], short[key][0])
        assert not whole[key][0][~keep].any()


def test_ppo_without_a_masked_tail_is_plain_gae_with_kl() -> None:
    batch = make_batch([4, 2])
    args = make_args(advantage_estimator="ppo", gamma=0.9, lambd=0.8, kl_coef=0.1)
    rewards = [
        -0.1 * (p - q) for p, q in zip(batch["log_probs"], batch["ref_log_probs"], strict=True)
    ]
    for r, reward in zip(rewards, batch["rewards"], strict=True):
        r[-1] += reward
    expected, _ = get_advantages_and_returns_batch(
        [6, 4], [4, 2], batch["values"], rewards, 0.9, 0.8
    )
    compute_advantages(args, batch, Identity())
    for a, e in zip(batch["advantages"], expected, strict=True):
        torch.testing.assert_close(a, e)


def test_a_sample_with_nothing_unmasked_has_no_advantage_under_ppo() -> None:
    batch = make_batch([3], loss_masks=[torch.zeros(3, dtype=torch.int32)])
    compute_advantages(make_args(advantage_estimator="ppo"), batch, Identity())
    assert batch["advantages"][0].tolist() == [0, 0, 0]


def test_distillation_lowers_the_advantage_where_the_student_is_surer_than_the_teacher() -> None:
    batch = make_batch([3])
    batch["loss_masks"] = [torch.tensor([1, 0, 1])]
    batch["log_probs"][0][1] = float("nan")
    compute_advantages(make_args(use_opd=True, opd_kl_coef=2.0), batch, Identity())
    kl = [
        float(batch["log_probs"][0][t] - batch["teacher_log_probs"][0][t]) if t != 1 else 0.0
        for t in range(3)
    ]
    assert batch["opd_reverse_kl"][0].tolist() == pytest.approx(kl)
    assert batch["advantages"][0].tolist() == pytest.approx(
        [batch["rewards"][0] - 2 * x for x in kl]
    )


def test_custom_function_then_distillation_and_whitening() -> None:
    def doubled(args: Any, rollout_data: dict[str, Any]) -> None:
        rollout_data["advantages"] = [2 * v for v in rollout_data["values"]]
        rollout_data["returns"] = [k + 1 for k in rollout_data["kl"]]

    def forgets(args: Any, rollout_data: dict[str, Any]) -> None:
        rollout_data["advantages"] = rollout_data["values"]

    def shortens(args: Any, rollout_data: dict[str, Any]) -> None:
        rollout_data["advantages"] = rollout_data["returns"] = [
            v[:1] for v in rollout_data["values"]
        ]

    batch = RankBatch(make_batch([3, 2]))
    args = make_args(use_opd=True, normalize_advantages=True).with_values(
        custom_advantage_function_path="mine.py:f"
    )
    settings = replace(
        AdvantageSettings.from_args(make_args(use_opd=True, normalize_advantages=True)), args=args
    )
    advantages.compute_advantages(replace(settings, custom=doubled), batch, Identity())
    raw = torch.cat(
        [2 * v - k for v, k in zip(batch["values"], batch["opd_reverse_kl"], strict=True)]
    )
    expected = (raw - raw.mean()) / (raw.var() + 1e-8).sqrt()
    torch.testing.assert_close(torch.cat(batch["advantages"]), expected)
    assert batch["returns"][0].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match=r"mine.py:f.*returns"):
        advantages.compute_advantages(
            replace(settings, custom=forgets), RankBatch(make_batch([3])), Identity()
        )
    with pytest.raises(ValueError, match=r"mine.py:f.*\(1,\)"):
        advantages.compute_advantages(
            replace(settings, custom=shortens), RankBatch(make_batch([3])), Identity()
        )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.0, r"\(\)"),
        (torch.ones(3, 1), r"\(3, 1\)"),
        (torch.full((3,), float("nan")), "divide by 0"),
    ],
)
def test_wrong_advantages_of_a_function_name_it(value: object, message: str) -> None:
    def fills(args: Any, rollout_data: dict[str, Any]) -> None:
        rollout_data["advantages"] = rollout_data["returns"] = [value]

    args = make_args().with_values(custom_advantage_function_path="mine.py:f")
    settings = replace(AdvantageSettings.from_args(make_args()), args=args, custom=fills)
    with pytest.raises(ValueError, match=rf"mine.py:f.*{message}"):
        advantages.compute_advantages(settings, RankBatch(make_batch([3])), Identity())


def test_disabled_advantages_leave_the_batch_alone() -> None:
    batch = make_batch([3])
    compute_advantages(make_args(compute_advantages_and_returns=False), batch, Identity())
    assert "advantages" not in batch and "kl" not in batch


def test_unknown_estimator_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"grppo.*grpo"):
        algorithm_class("grppo")


# --- whitening ---------------------------------------------------------------------------------


class ThreadReduce:
    """A real sum over ranks that run as threads of this process."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.barrier, self.shared = (
            ranks,
            threading.Barrier(ranks, timeout=120),
            [None] * ranks,
        )
        self.rank = threading.local()

    def over_data(self, x: Tensor) -> Tensor:
        self.shared[self.rank.index] = x
        self.barrier.wait()
        total = sum(self.shared)
        self.barrier.wait()
        return total

    over_sequence = over_data


def on_ranks(ranks: int, job: Any) -> list[Any]:
    reduce, results = ThreadReduce(ranks), [None] * ranks

    def run(index: int) -> None:
        reduce.rank.index = index
        results[index] = job(index, reduce)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    return results


@quick
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 20))
def test_whitening_is_masked_and_bessel_corrected(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    advantages = [torch.randn(n, generator=generator, dtype=torch.float64) * 3 + 5 for n in lengths]
    masks = [(torch.rand(n, generator=generator) < 0.7).int() for n in lengths]
    poisoned = [
        torch.where(m.bool(), a, torch.full_like(a, float("nan")))
        for a, m in zip(advantages, masks, strict=True)
    ]
    out = normalize_advantages(poisoned, masks, Identity())
    flat = [float(x) for a, m in zip(advantages, masks, strict=True) for x in a[m.bool()]]
    got = [float(x) for a, m in zip(out, masks, strict=True) for x in a[m.bool()]]
    if len(flat) < 2:
        assert got == pytest.approx([0.0] * len(flat))
        return
    mean, variance = statistics.fmean(flat), statistics.variance(flat)
    assert got == pytest.approx(
        [(x - mean) / (variance + 1e-8) ** 0.5 for x in flat], rel=1e-9, abs=1e-9
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_whitening_does_not_depend_on_how_samples_are_spread(ranks: int) -> None:
    advantages = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (3, 5, 2, 7)]
    masks = [torch.ones_like(a).int() for a in advantages]
    whole = normalize_advantages(advantages, masks, Identity())
    # the last rank has no sample at all, and still takes part
    where = [i % (ranks - 1) for i in range(4)]

    def job(rank: int, reduce: Any) -> list[Tensor]:
        mine = [i for i in range(4) if where[i] == rank]
        return normalize_advantages([advantages[i] for i in mine], [masks[i] for i in mine], reduce)

    for rank, part in enumerate(on_ranks(ranks, job)):
        for i, got in zip([i for i in range(4) if where[i] == rank], part, strict=True):
            torch.testing.assert_close(got, whole[i], rtol=1e-6, atol=1e-7)


# --- group baselines ---------------------------------------------------------------------------


@quick
@given(st.lists(st.integers(-8, 8), min_size=1, max_size=12))
def test_baselines(rewards: list[int]) -> None:
    """Against statistics' exact means and deviations; equal rewards give exactly 0."""
    values = [float(r) for r in rewards]
    mean = statistics.fmean(values)
    deviation = statistics.stdev(values) + 1e-6 if len(values) > 1 else 1.0
    others = [
        statistics.fmean(values[:i] + values[i + 1 :]) if len(values) > 1 else r
        for i, r in enumerate(values)
    ]
    assert centred(values) == pytest.approx([r - mean for r in values])
    assert standardized(values) == pytest.approx([(r - mean) / deviation for r in values])
    assert leave_one_out(values) == pytest.approx(
        [r - o for r, o in zip(values, others, strict=True)]
    )
    if len(set(values)) == 1:
        assert {*centred(values), *standardized(values), *leave_one_out(values)} == {0.0}


def test_equal_rewards_give_exactly_zero_also_where_their_mean_is_rounded() -> None:
    rewards = [0.1] * 3
    assert sum(rewards) / 3 != 0.1
    assert centred(rewards) == standardized(rewards) == leave_one_out(rewards) == [0.0] * 3


def test_overlong_rewards_fall_over_the_buffer_and_no_further() -> None:
    penalties = [
        overlong_penalty(n, max_length=20, buffer=4, factor=2.0) for n in (0, 16, 17, 18, 20, 25)
    ]
    assert penalties == [0.0, 0.0, -0.5, -1.0, -2.0, -2.0]
