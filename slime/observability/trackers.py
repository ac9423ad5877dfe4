"""The trackers of ``--tracker``: TensorBoard, those of plug-ins, and the user's own.

Each package is imported when a run with it begins. An error of a tracker while the run trains is
reported once, and the run continues: ``metrics.jsonl`` has all numbers in any case.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.flag import own_section
from slime.config.hooks import load_function
from slime.config.observability import chosen_trackers
from slime.config.settings import redacted
from slime.observability.files import warn
from slime.observability.run_dir import RunDir, public_settings
from slime.registry import find, parts

if TYPE_CHECKING:
    from slime.config.args import Args

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
        own: The section of the flags that the tracker brings, with secrets; None if it brings none.
    """

    project: str
    folder: Path
    config: Mapping[str, object]
    args: Args
    resume_from: int | None = None
    own: Any = field(default=None, repr=False)

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
        run = Tracked(
            args.tracker_project, folder, public_settings(vars(public)), public, resume_from
        )
        self._told: set[str] = set()
        self._started: dict[str, Tracker] = {}
        for name in chosen_trackers(args):
            # At the user's own start an error can be mended at once; a run that goes on by itself
            # must not end for it.
            with self.tolerant(name) if unattended else contextlib.nullcontext():
                own = own_section(parts("tracker").get(name), args)
                self._started[name] = _start(name, replace(run, own=own))

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
                warn(
                    f"--tracker {name}: {type(error).__name__}: {error} (reported once; the run "
                    "continues)"
                )


def _start(name: str, run: Tracked) -> Tracker:
    try:
        create = find("tracker", name) if name in parts("tracker") else load_function(name)
        made: Any = create(run)
    except ImportError as error:
        part = parts("tracker").get(name)
        package = (part and part.package) or (name, name)
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
