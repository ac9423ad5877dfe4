"""Learning rates against Megatron's formulas, written out by hand."""

from __future__ import annotations

import math

import pytest
from fsdp_helpers import make_args
from hypothesis import given
from hypothesis import strategies as st

from slime.backends.lr_schedule import LrSchedule, planned_steps, zero_lr_warning

STYLES = ["constant", "linear", "cosine", "inverse-square-root", "WSD"]


def test_constant_from_the_first_step() -> None:
    schedule = LrSchedule(max_lr=2.0)
    assert [schedule.lr(k) for k in (0, 1, 1000)] == [2.0, 2.0, 2.0]


def test_warmup_rises_from_init_and_peaks_at_its_end() -> None:
    schedule = LrSchedule(max_lr=1.0, warmup_steps=4, warmup_init=0.2)
    assert [schedule.lr(k) for k in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_linear_and_cosine() -> None:
    linear = LrSchedule(max_lr=1.0, min_lr=0.1, style="linear", warmup_steps=2, decay_steps=12)
    assert linear.lr(7) == pytest.approx(0.1 + 0.9 * 0.5)
    assert linear.lr(12) == pytest.approx(0.1)
    assert linear.lr(13) == 0.1
    cosine = LrSchedule(max_lr=1.0, min_lr=0.1, style="cosine", decay_steps=8)
    assert cosine.lr(2) == pytest.approx(0.1 + 0.9 * 0.5 * (math.cos(math.pi / 4) + 1))


def test_inverse_square_root() -> None:
    schedule = LrSchedule(
        max_lr=1.0, min_lr=0.01, style="inverse-square-root", warmup_steps=4, decay_steps=10000
    )
    assert schedule.lr(16) == pytest.approx(0.5)
    assert schedule.lr(9999) == pytest.approx(math.sqrt(4 / 9999))


@pytest.mark.parametrize(
    ("style", "half"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("exponential", 2 * 0.5**0.5 - 1),
        ("minus_sqrt", 1 - math.sqrt(0.5)),
    ],
)
def test_wsd_is_flat_then_falls(style: str, half: float) -> None:
    schedule = LrSchedule(
        max_lr=1.0, style="WSD", decay_steps=10, wsd_decay_steps=4, wsd_style=style
    )
    assert schedule.lr(6) == 1.0
    assert schedule.lr(8) == pytest.approx(half)
    assert schedule.lr(10) == pytest.approx(0.0, abs=1e-12)


@given(style=st.sampled_from(STYLES), warmup=st.integers(0, 5), step=st.integers(0, 40))
def test_rate_stays_between_its_bounds(style: str, warmup: int, step: int) -> None:
    schedule = LrSchedule(1.0, 0.05, style, warmup, 0.0, decay_steps=20, wsd_decay_steps=6)
    assert 0.0 <= schedule.lr(step) <= 1.0
    if step >= warmup:
        assert schedule.lr(step) >= 0.05 - 1e-12


def test_from_args() -> None:
    args = make_args(
        "x", num_rollout=10, lr_decay_style="cosine", lr_warmup_fraction=0.2, min_lr=1e-5
    )
    schedule = LrSchedule.from_args(args)
    assert (schedule.decay_steps, schedule.warmup_steps, schedule.min_lr) == (10, 2, 1e-5)
    args.global_batch_size = 8
    assert planned_steps(args) == 20
    args.critic_lr, args.critic_lr_warmup_iters = 0.5, 7
    critic = LrSchedule.from_args(args, "critic")
    assert (critic.max_lr, critic.warmup_steps) == (0.5, 7)


def test_warmup_as_long_as_the_decay_is_an_error() -> None:
    args = make_args("x", lr_decay_style="linear", lr_warmup_iters=10, lr_decay_iters=10)
    with pytest.raises(ValueError, match="10 steps"):
        LrSchedule.from_args(args)


@pytest.mark.parametrize("flags", [{"lr_decay_style": "cosine"}, {"lr_warmup_fraction": 0.1}])
def test_a_schedule_that_needs_the_length_of_the_run_raises_when_it_is_unknown(
    flags: dict[str, object],
) -> None:
    args = make_args("x", num_rollout=None, **flags)
    with pytest.raises(ValueError, match="number of rollouts"):
        LrSchedule.from_args(args)
    args.lr_decay_iters = 20
    assert LrSchedule.from_args(args).decay_steps == 20


def test_the_actors_decay_leaves_out_the_rollouts_that_train_the_critic_alone() -> None:
    args = make_args(
        "x", advantage_estimator="ppo", num_critic_only_steps=4, lr_decay_style="cosine"
    )
    assert LrSchedule.from_args(args).decay_steps == 6
    assert LrSchedule.from_args(args, "critic").decay_steps == 10


def test_a_constant_rate_needs_no_length() -> None:
    args = make_args("x", num_rollout=None, lr_warmup_iters=3)
    assert LrSchedule.from_args(args).lr(100) == args.lr


def test_a_step_with_a_learning_rate_of_zero_is_told() -> None:
    warning = zero_lr_warning(
        {"train/lr-pg_0": 0.0, "train/critic-lr-pg_0": 1e-5}, 3, warms_up=False
    )
    assert warning is not None and "actor was 0 in a step" in warning
    assert zero_lr_warning({"train/lr-pg_0": 1e-6}, 3, warms_up=False) is None
    assert zero_lr_warning({}, 3, warms_up=False) is None
    assert zero_lr_warning({"train/lr-pg_0": 0.0}, 0, warms_up=True) is None, (
        "a warm-up starts from 0"
    )
    assert zero_lr_warning({"train/lr-pg_0": 0.0}, 1, warms_up=True) is not None
