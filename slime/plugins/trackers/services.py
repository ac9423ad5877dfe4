"""Weights & Biases, MLflow, Trackio and SwanLab as trackers."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime.config.settings import redacted_words
from slime.observability.metric_utils import compute_rollout_step
from slime.observability.trackers import COLUMNS, Cells, Tracked, Tracker, table_cell
from slime.plugins.trackers import WandbConfig


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


class Mlflow(Tracker):
    """MLflow. Without ``MLFLOW_TRACKING_URI``, its files are in ``mlruns/`` of the run's folder. A
    resumed run continues the MLflow run of its name."""

    def __init__(self, run: Tracked) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        # Each table of samples would draw bars over the lines of the run.
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        # A server that is away holds up a step for 6 s; with MLflow's own 7, for four minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        # Without a server, the files are in the folder of the run, where they move with it.
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            # a run without a server needs no database
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run.folder / "mlruns").resolve().as_uri()
        client = self._client = MlflowClient(tracking_uri=uri)
        known = client.get_experiment_by_name(run.project)
        experiment = known.experiment_id if known else client.create_experiment(run.project)
        runs = client.search_runs([experiment], order_by=["attributes.start_time DESC"])
        earlier = [found.info.run_id for found in runs if found.info.run_name == run.folder.name]
        if run.resumed and earlier:
            self._id = earlier[0]
            client.update_run(self._id, status="RUNNING")
        else:
            self._id = client.create_run(experiment, run_name=run.folder.name).info.run_id
            settings = [Param(name, str(value)) for name, value in run.config.items()]
            for begin in range(0, len(settings), 100):  # the most that a server takes at once
                client.log_batch(self._id, params=settings[begin : begin + 100])
        client.log_dict(self._id, dict(run.config), "config.yaml")

    def log(self, numbers: Mapping[str, float], step: int, step_key: str) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # MLflow refuses a batch in which one name has another character.
        metrics = [
            Metric(re.sub(r"[^\w\-. /:]", "_", name), value, now, step)
            for name, value in numbers.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def samples(self, rows: Sequence[Cells], step: int) -> None:
        table = {
            "step": [step] * len(rows),
            **{column: [table_cell(row, column) for row in rows] for column in COLUMNS},
        }
        self._client.log_table(self._id, table, "samples.json")

    def close(self) -> None:
        self._client.set_terminated(self._id, "FAILED" if self.failed else "FINISHED")


class Trackio(Tracker):
    """Trackio. Its database is in ``TRACKIO_DIR``; ``trackio show`` serves it."""

    def __init__(self, run: Tracked) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(
            project=run.project,
            name=run.folder.name,
            config=dict(run.config),
            resume="allow" if run.resumed else "never",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, numbers: Mapping[str, float], step: int, step_key: str) -> None:
        self._trackio.log(dict(numbers), step=step)

    def samples(self, rows: Sequence[Cells], step: int) -> None:
        data = [[table_cell(row, column) for column in COLUMNS] for row in rows]
        self._trackio.log(
            {"samples": self._trackio.Table(columns=list(COLUMNS), data=data)}, step=step
        )

    def close(self) -> None:
        self._trackio.finish()


class Swanlab(Tracker):
    """SwanLab. Its files are in ``swanlog/`` of the run's folder; ``SWANLAB_MODE`` determines
    whether they are sent.
    """

    def __init__(self, run: Tracked) -> None:
        import swanlab

        self._swanlab = swanlab
        folder = run.folder / "swanlog"
        folder.mkdir(exist_ok=True)
        # The facts about the process include its command line as it is, with a key that was given
        # on it.
        settings = swanlab.Settings(probe=swanlab.Settings.Probe(runtime=False))
        swanlab.init(
            project=run.project,
            name=run.folder.name,
            config=dict(run.config),
            log_dir=str(folder),
            settings=settings,
        )

    def log(self, numbers: Mapping[str, float], step: int, step_key: str) -> None:
        self._swanlab.log(dict(numbers), step=step)

    def samples(self, rows: Sequence[Cells], step: int) -> None:
        texts = [
            "\n\n".join(f"{column}: {table_cell(row, column)}" for column in COLUMNS)
            for row in rows
        ]
        self._swanlab.log({"samples": [self._swanlab.Text(text) for text in texts]}, step=step)

    def close(self) -> None:
        ended = {"state": "crashed", "error": "an error ended the run"} if self.failed else {}
        self._swanlab.finish(**ended)
