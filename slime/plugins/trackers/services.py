"""MLflow, Trackio and SwanLab as trackers."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence

from slime.observability.trackers import COLUMNS, Cells, Tracked, Tracker, table_cell


class Mlflow(Tracker):
    """MLflow. Without ``MLFLOW_TRACKING_URI``, its files are in ``mlruns/`` of the run's folder. A
    resumed run continues the MLflow run of its name."""

    def __init__(self, run: Tracked) -> None:
        from mlflow.tracking import MlflowClient

        # Without a server, the files are in the folder of the run, where they move with it.
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            # a run without a server needs no database
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run.folder / "mlruns").resolve().as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)
        self._id = (
            self._earlier(experiment, run)
            or self._client.create_run(experiment, run_name=run.folder.name).info.run_id
        )
        self._client.update_run(self._id, status="RUNNING")  # an earlier one has ended
        self._client.log_dict(self._id, dict(run.config), "config.yaml")

    def _earlier(self, experiment: str, run: Tracked) -> str | None:
        if not run.resumed:
            return None
        runs = self._client.search_runs([experiment], order_by=["attributes.start_time DESC"])
        return next(
            (found.info.run_id for found in runs if found.info.run_name == run.folder.name), None
        )

    def log(self, numbers: Mapping[str, float], step: int, step_key: str) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # MLflow refuses a batch in which one name has another character.
        names = {name: re.sub(r"[^\w\-. /:]", "_", name) for name in numbers}
        metrics = [Metric(names[name], value, now, step) for name, value in numbers.items()]
        for begin in range(0, len(metrics), 1000):  # the most that a server takes at once
            self._client.log_batch(self._id, metrics=metrics[begin : begin + 1000])

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
