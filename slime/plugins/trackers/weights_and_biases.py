"""Weights & Biases as a tracker."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime.config.settings import redacted_words
from slime.observability.metric_utils import compute_rollout_step
from slime.observability.trackers import COLUMNS, Cells, Tracked, Tracker, table_cell
from slime.plugins.trackers.config import WandbConfig


class Wandb(Tracker):
    """Weights & Biases. Its files are in ``--wandb-dir``, or else in the run's folder."""

    takes_nan = True

    def __init__(self, run: Tracked) -> None:
        self._args = run.args
        self._run = start_wandb(run)

    def log(self, numbers: Mapping[str, float], step: int, step_key: str) -> None:
        if self._args.wandb_always_use_train_step:
            step_key = "train/step"
            step = compute_rollout_step(self._args, step)
        self._run.log({step_key: step, **numbers})

    def samples(self, rows: Sequence[Cells], step: int) -> None:
        import wandb

        data = [[table_cell(row, column) for column in COLUMNS] for row in rows]
        table = wandb.Table(columns=list(COLUMNS), data=data, allow_mixed_types=True)
        self.log({"samples": table}, step, "rollout/step")

    def close(self) -> None:
        self._run.finish(exit_code=int(self.failed))


@contextlib.contextmanager
def public_command_line() -> Iterator[None]:
    """Hide secrets in ``sys.argv``, which W&B stores with the run. The supervisor and Ray do not
    read it meanwhile.
    """
    words = sys.argv
    sys.argv = redacted_words(words)
    try:
        yield
    finally:
        sys.argv = words


def start_wandb(tracked: Tracked) -> Any:
    """Log in to W&B and start the run; the tracker logs with what is returned."""
    import wandb

    flags: WandbConfig = tracked.own
    if flags.wandb_host:
        os.environ["WANDB_BASE_URL"] = flags.wandb_host
    if flags.wandb_key:
        wandb.login(key=flags.wandb_key, host=flags.wandb_host)
    with public_command_line():
        run = wandb.init(
            entity=flags.wandb_team,
            project=flags.wandb_project or "slime",
            group=flags.wandb_group,
            name=tracked.folder.name,
            id=flags.wandb_run_id,
            resume="allow" if flags.wandb_run_id else None,
            mode=flags.wandb_mode,
            dir=flags.wandb_dir or str(tracked.folder),
            config=dict(tracked.config),
        )
    # W&B counts calls; curves are drawn over the step that each group of metrics belongs to.
    axis = "train/step" if flags.wandb_always_use_train_step else "rollout/step"
    for key in ("train/step", "rollout/step", "eval/step"):
        wandb.define_metric(key)
    for group in ("train", "rollout", "perf", "passrate", "multi_turn", "eval"):
        own = "eval/step" if group == "eval" and axis == "rollout/step" else axis
        wandb.define_metric(f"{group}/*", step_metric=own)
    return run
