"""The deadlines of a weight sync lie within those of what waits for it."""

from __future__ import annotations

from make_args import make_args

from slime.weights.settings import WeightSyncSettings


def test_a_frozen_engine_is_given_up_before_the_other_ranks_give_up_the_sender() -> None:
    """They wait in a collective operation, whose end would break the process group of the trainer."""
    args = make_args(distributed_timeout_minutes=1, phase_timeout=3600.0)
    assert WeightSyncSettings.from_args(args).step_seconds == 48.0
    args = make_args(distributed_timeout_minutes=60, phase_timeout=100.0)
    assert WeightSyncSettings.from_args(args).step_seconds == 90.0
