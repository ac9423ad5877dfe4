"""The trackers of ``--tracker``: TensorBoard, Weights & Biases, MLflow, Trackio, SwanLab, and the
user's own.

Each package is imported when a run with it begins. An error of a tracker while the run trains is
reported once, and the run continues: ``metrics.jsonl`` has all numbers in any case.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.hooks import load_function
from slime.config.observability import chosen_trackers, tracker_packages
from slime.config.settings import redacted, redacted_words
from slime.observability.metric_utils import compute_rollout_step
from slime.observability.run_dir import RunDir, public_settings
from slime.registry import find, parts

if TYPE_CHECKING:
    from slime.config.args import Args

logger = logging.getLogger(__name__)
Cells = Mapping[str, object]
"""One row of a table of samples: ``prompt``, ``response``, ``label``, ``reward``."""
COLUMNS = ("prompt", "response", "label", "reward")


class TrackerError(ValueError):
    """A tracker cannot be started; the message says what to do."""


@dataclass(frozen=True)
class Tracked:
    """The description of a run that a tracker gets.

    Attributes:
        project: Project, or experiment of MLflow (``--tracker-project``).
        folder: Folder of the run; its name is the name of the run.
        config: All settings of the run without secrets.
        args: The arguments of the run; secrets have the value ``***``.
        resume_from: First step that a resumed run repeats; None if the run begins.
        key: ``--wandb-key``, which only W&B gets.
    """

    project: str
    folder: Path
    config: Mapping[str, object]
    args: Args
    resume_from: int | None = None
    key: str | None = field(default=None, repr=False)

    @property
    def resumed(self) -> bool:
        """Whether the run continues one of the same name."""
        return self.resume_from is not None


class Tracker(ABC):
    """A destination of a run's metrics. A class of the user is created with a :class:`Tracked`.

    Attributes:
        failed: Whether an error ended the run; set before :meth:`close`.
        takes_nan: Whether :meth:`log` gets numbers that are not finite as well.
    """

    failed = False
    takes_nan = False

    @abstractmethod
    def log(self, numbers: Mapping[str, float], step: int, step_key: str) -> None:
        """Take the metrics of a step; ``step_key`` is ``rollout/step``, ``train/step`` or
        ``eval/step``.
        """

    def samples(self, rows: Sequence[Cells], step: int) -> None:
        """Take some samples of a rollout."""
        return None

    def close(self) -> None:
        """The run has ended."""
        return None


class TensorBoard(Tracker):
    """TensorBoard. Unlike ``torch.utils.tensorboard``, it does not import torch.

    The events are in ``$TENSORBOARD_DIR`` if it is set, or else in
    ``tensorboard_log/<project>/<experiment>`` with ``--tb-project-name``, or else in
    ``tensorboard/`` of the run's folder.
    """

    takes_nan = True

    def __init__(self, run: Tracked) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = RunDir(run.folder).tensorboard
        if run.args.tb_project_name:
            experiment = run.args.tb_experiment_name or run.folder.name
            folder = Path("tensorboard_log") / run.args.tb_project_name / experiment
        folder = Path(os.environ.get("TENSORBOARD_DIR") or folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))
        # These events make TensorBoard discard the interrupted run's events from this step on.
        if run.resume_from is not None:
            moment = {"wall_time": time.time(), "step": run.resume_from}
            self._writer.add_event(Event(**moment, file_version="brain.Event:2"))
            self._writer.add_event(Event(**moment, session_log=SessionLog(status=SessionLog.START)))
        self._writer.flush()

    def log(self, numbers: Mapping[str, float], step: int, step_key: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.add_event(
            Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


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

    args = tracked.args
    if args.wandb_host:
        os.environ["WANDB_BASE_URL"] = args.wandb_host
    if tracked.key:
        wandb.login(key=tracked.key, host=args.wandb_host)
    with public_command_line():
        run = wandb.init(
            entity=args.wandb_team,
            project=args.wandb_project or "slime",
            group=args.wandb_group,
            name=tracked.folder.name,
            id=args.wandb_run_id,
            resume="allow" if args.wandb_run_id else None,
            mode=args.wandb_mode,
            dir=args.wandb_dir or str(tracked.folder),
            config=dict(tracked.config),
        )
    # W&B counts calls; curves are drawn over the step that each group of metrics belongs to.
    axis = "train/step" if args.wandb_always_use_train_step else "rollout/step"
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


class Trackers:
    """All trackers of a run.

    Args:
        unattended: Whether the run goes on by itself after a loss. Then one that cannot be started
            is left out.

    Raises:
        TrackerError: A package is missing, or a tracker cannot be started.
    """

    def __init__(
        self, args: Args, folder: Path, resume_from: int | None, unattended: bool = False
    ) -> None:
        public = args.with_values(
            **{key: redacted(key, value) for key, value in vars(args).items()}
        )
        settings = public_settings(vars(public))
        run = Tracked(args.tracker_project, folder, settings, public, resume_from)
        self._told: set[str] = set()
        self._started: dict[str, Tracker] = {}
        for name in chosen_trackers(args):
            # At the user's own start an error can be mended at once; a run that goes on by itself
            # must not end for it.
            with self.tolerant(name) if unattended else contextlib.nullcontext():
                key = args.wandb_key if name == "wandb" else None
                self._started[name] = _start(name, replace(run, key=key))

    def log(self, numbers: Mapping[str, float], step: int, step_key: str) -> None:
        # Some servers refuse a whole batch of numbers if one of them is NaN.
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        self._each(
            lambda tracker: tracker.log(numbers if tracker.takes_nan else finite, step, step_key)
        )

    def samples(self, rows: Sequence[Cells], step: int) -> None:
        if rows:
            self._each(lambda tracker: tracker.samples(rows, step))

    def close(self, failed: bool = False) -> None:
        for tracker in self._started.values():
            tracker.failed = failed
        self._each(lambda tracker: tracker.close())
        self._started = {}

    @property
    def take_samples(self) -> bool:
        """Whether a tracker shows samples; TensorBoard does not, so that their file need not be
        read for it.
        """
        return any(
            type(tracker).samples is not Tracker.samples for tracker in self._started.values()
        )

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in self._started.items():
            with self.tolerant(name):
                call(tracker)

    @contextlib.contextmanager
    def tolerant(self, name: str) -> Iterator[None]:
        """Report an error of the block as one of this tracker, once, and continue after the
        block.
        """
        try:
            yield
        except Exception as error:  # a tracker is a third-party program, often on another machine
            if name not in self._told:
                self._told.add(name)
                logger.warning(
                    "--tracker %s: %s: %s (reported once; the run continues)",
                    name,
                    type(error).__name__,
                    error,
                )


def _start(name: str, run: Tracked) -> Tracker:
    try:
        create = find("tracker", name) if name in parts("tracker") else load_function(name)
        made: Any = create(run)
    except ImportError as error:
        package = tracker_packages().get(name) or (name, name)
        raise TrackerError(f"--tracker {name}: {error}; run pip install {package[1]}") from error
    except Exception as error:  # as above
        raise TrackerError(
            f"--tracker {name}: it cannot be started: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, Tracker):
        raise TrackerError(
            f"--tracker {name}: it is a {type(made).__name__}, not a "
            "slime.observability.trackers.Tracker"
        )
    return made


def table_cell(row: Cells, column: str) -> object:
    """A value of a table: numbers, truth values and None as they are, anything else as text."""
    value = row.get(column)
    return value if value is None or isinstance(value, bool | int | float) else str(value)
