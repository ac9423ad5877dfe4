"""Documented import path of the data-parallel schedule; the code is in
:mod:`slime.data.schedule`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from slime.config.args import Args
from slime.config.layout import ParallelLayout
from slime.data import schedule

__all__ = ["build_dp_schedule"]


def build_dp_schedule(
    args: Args | SimpleNamespace,
    train_parallel_config: Mapping[str, int],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
    prompts: Sequence[tuple[Hashable, int]] | None = None,
) -> schedule.Schedule:
    """Call :func:`slime.data.schedule.build_dp_schedule` with the settings of ``args``: those of a
    run, or a plain namespace with only those that matter. What it does not set has the default of
    its flag."""
    settings: Any = SimpleNamespace(**(vars(Args()) | vars(args)))
    cp = train_parallel_config.get("cp_size") or 1
    is_interleaved = (train_parallel_config.get("vpp_size") or 1) > 1
    group = is_interleaved and train_parallel_config.get("microbatch_group_size_per_vp_stage")
    return schedule.build_dp_schedule(
        schedule.PackingSettings.from_args(settings),
        ParallelLayout(train_parallel_config["dp_size"] * cp, cp=cp, vpp_group=group or 1),
        total_lengths,
        global_batch_size=global_batch_size,
        rollout_indices=rollout_indices,
        prompts=prompts,
    )
