"""Documented import path of the data-parallel schedule; the code is in :mod:`slime.data.schedule`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from slime.data import schedule

if TYPE_CHECKING:
    from slime.config.args import Args

__all__ = ["build_dp_schedule"]


def build_dp_schedule(
    args: Args,
    train_parallel_config: Mapping[str, int],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
    prompts: Sequence[tuple[Hashable, int]] | None = None,
) -> schedule.Schedule:
    """Call :func:`slime.data.schedule.build_dp_schedule` with the settings of ``args``."""
    return schedule.build_dp_schedule(
        schedule.PackingSettings.from_args(args),
        train_parallel_config,
        total_lengths,
        global_batch_size=global_batch_size,
        rollout_indices=rollout_indices,
        prompts=prompts,
    )
