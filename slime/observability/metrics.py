"""Log the metrics of a run to ``metrics.jsonl``, TensorBoard, and the other trackers of ``--tracker``.

A row of ``metrics.jsonl`` is ``{"<step key>": step, "time": wall seconds, "<name>": number, ...}``.
The step keys are ``train/step``, ``rollout/step`` and ``eval/step``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

from slime.config.observability import chosen_trackers
from slime.config.settings import redacted_words
from slime.observability.best_effort import AppendedFile, best_effort, replacing
from slime.observability.regular import regular
from slime.observability.run_dir import RunDir, public_settings
from slime.observability.samples import KeptTexts, read_samples, sample_files
from slime.observability.trackers import COLUMNS, Cells, Trackers, table_cell

if TYPE_CHECKING:
    from slime.config.args import Args

_TABLE_ROWS = 8  # samples of a rollout in the table of a tracker
STEP_KEYS = ("train/step", "rollout/step", "eval/step")


class MetricsError(ValueError):
    """Raised if a metric is not a number, if W&B is not installed, or if ``metrics.jsonl`` is missing or invalid."""


Row = dict[str, float | None]
"""One line of ``metrics.jsonl``. Numbers that are not finite are None."""


class MetricsLogger:
    """Writes metrics to all sinks. A run has one, in the driver.

    Args:
        args: The arguments of the run.
        run_dir: The folder of ``metrics.jsonl`` and ``tensorboard/``.
        resume_from: First step that a resumed run repeats. The rows of the interrupted run from this step on move to
            ``metrics-rolled-back.jsonl``.
        unattended: Whether the run goes on by itself after a loss. Then a tracker that cannot be started, because its
            server is down for example, is reported and left out.

    Raises:
        MetricsError: ``--use-wandb`` is given, but W&B is not installed.
        OSError: A file cannot be opened. Later, an error while writing is only logged and the run continues: rows of
            ``metrics.jsonl`` wait in memory until there is space again, but TensorBoard's file may stay incomplete.
    """

    def __init__(self, args: Args, run_dir: RunDir, resume_from: int | None = None, unattended: bool = False) -> None:
        self._warned: set[str] = set()
        self._samples_per_rollout = args.rollout_batch_size * args.n_samples_per_prompt
        self._global_batch_size = args.global_batch_size if args.wandb_always_use_train_step else None
        if resume_from is not None:
            roll_back(run_dir.metrics, resume_from)
        self._rows = AppendedFile(run_dir.metrics, "metrics.jsonl")
        self._tensorboard = None
        chosen = chosen_trackers(args)
        if "tensorboard" in chosen:
            folder = _tensorboard_dir(args.tb_project_name, args.tb_experiment_name, run_dir)
            self._tensorboard = _TensorBoard(folder, purge_step=resume_from)
        self._trackers = Trackers(args, run_dir.path, resume_from is not None, unattended)
        self._wandb = None
        if "wandb" in chosen:
            with self._trackers.tolerant("wandb") if unattended else contextlib.nullcontext():
                self._wandb = start_wandb(args, run_dir)
        self._run = run_dir.path

    def log(self, metrics: Mapping[str, SupportsFloat], step: int, step_key: str = "rollout/step") -> None:
        """Write one row.

        Args:
            metrics: Numbers by name (Python or NumPy numbers, or tensors with one element).
            step: Number of the rollout. With ``--wandb-always-use-train-step``, the x-axis in W&B is instead the number
                of optimizer steps before it (``train/step``).
            step_key: Name of the x-axis, one of :data:`STEP_KEYS`.

        Raises:
            MetricsError: A value is not a number, or the step key is unknown.
        """
        if step_key not in STEP_KEYS:
            raise MetricsError(f"unknown step key {step_key!r}: use one of {', '.join(STEP_KEYS)}")
        numbers = {name: self._number(name, value) for name, value in metrics.items()}
        now = time.time()
        row: Row = {step_key: step, "time": round(now, 3)}
        # A metric must not replace the step or the time of the row.
        row |= {name: value if math.isfinite(value) else None for name, value in numbers.items() if name not in row}
        self._rows.write(json.dumps(row, allow_nan=False))
        if self._tensorboard is not None:
            with best_effort("TensorBoard events"):
                self._tensorboard.write(numbers, step, now)
        self._trackers.log(numbers, step, step_key)
        shown: list[dict[str, Any]] = []
        if step_key == "rollout/step" and (self._trackers or self._wandb is not None):
            shown = self._shown(step)
            self._trackers.samples(shown, step)
        if self._wandb is not None:
            if self._global_batch_size:
                step_key, step = "train/step", step * self._samples_per_rollout // self._global_batch_size
            with self._trackers.tolerant("wandb"):
                self._wandb.log({step_key: step, **numbers, **wandb_table(shown)})

    def _shown(self, step: int) -> list[dict[str, Any]]:
        """Some samples of a rollout, from the file that the rollout manager has written."""
        path = sample_files(self._run, "rollout").get(f"rollout_{step:06d}")
        return KeptTexts(_TABLE_ROWS).chosen(read_samples(path)) if path else []

    def _number(self, name: str, value: SupportsFloat) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise MetricsError(f"metric {name!r} is not a number: {value!r:.120}") from error
        if not math.isfinite(number) and name not in self._warned:
            self._warned.add(name)
            with contextlib.suppress(OSError):  # nobody reads it any more, or its disk is full
                print(f"metric {name} is {number} (null in metrics.jsonl; reported once)", file=sys.stderr, flush=True)
        return number

    def close(self, failed: bool = False) -> None:
        """Flush and close all sinks. It is safe to call this twice.

        Args:
            failed: Whether an error ended the run, which trackers show.
        """
        self._rows.close()
        if self._tensorboard is not None:
            with best_effort("TensorBoard events"):
                self._tensorboard.close()
        self._trackers.close(failed)
        if self._wandb is not None:
            with self._trackers.tolerant("wandb"):
                self._wandb.finish(exit_code=int(failed))
            self._wandb = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all rows of a ``metrics.jsonl``. An incomplete last line, which is being written, is left out.

    Raises:
        MetricsError: The file cannot be read, or a row is not a JSON object of numbers.
    """
    return [row for _, row in _rows(path)]


def roll_back(path: Path, step: int) -> int:
    """Move the rows of steps ``>= step`` from ``metrics.jsonl`` to another file, and return their number.

    Afterwards the file of an interrupted and resumed run is the same as that of an uninterrupted one.
    """
    if not path.exists():
        return 0
    keep: list[str] = []
    gone: list[str] = []
    for line, row in _rows(path):
        (gone if any(row.get(key, -1) >= step for key in STEP_KEYS) else keep).append(line)
    if gone:  # these rows are written before they are removed, so that an interruption cannot lose them
        with path.with_name("metrics-rolled-back.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in gone)
    with replacing(path) as temporary:
        temporary.write_text("".join(line + "\n" for line in keep), encoding="utf-8")
    return len(gone)


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = regular(path).read_text(encoding="utf-8")
    except OSError as error:
        raise MetricsError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise MetricsError(f"{path} is damaged: it is not UTF-8 ({error.reason} at byte {error.start})") from error
    complete = text if text.endswith("\n") else text[: text.rfind("\n") + 1]
    for number, line in enumerate(complete.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise MetricsError(f"{path}:{number}: the row is not valid JSON ({error})") from error
        if not isinstance(row, dict) or not all(map(_is_number, row.values())):
            raise MetricsError(f"{path}:{number}: the row is not a JSON object of numbers")
        yield line, row


def _is_number(value: object) -> bool:
    """Whether a value of a row is a number that fits 64 bits, or null."""
    return value is None or type(value) is float or (type(value) is int and -(2**63) <= value < 2**63)


def _tensorboard_dir(project: str | None, experiment: str | None, run_dir: RunDir) -> Path:
    """Return ``$TENSORBOARD_DIR`` if it is set, or else ``tensorboard_log/<project>/<experiment>`` with
    ``--tb-project-name``, or else ``outputs/<run>/tensorboard``."""
    if os.environ.get("TENSORBOARD_DIR"):
        return Path(os.environ["TENSORBOARD_DIR"])
    if project:
        return Path("tensorboard_log") / project / (experiment or run_dir.path.name)
    return run_dir.tensorboard


class _TensorBoard:
    """Writes scalars as TensorBoard events. Unlike ``torch.utils.tensorboard``, it does not import torch."""

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))
        # These events make TensorBoard discard the interrupted run's events from this step on.
        if purge_step is not None:
            event = Event(wall_time=time.time(), step=purge_step, file_version="brain.Event:2")
            self._writer.add_event(event)
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=purge_step, session_log=start))
        self._writer.flush()

    def write(self, numbers: Mapping[str, float], step: int, now: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.add_event(Event(wall_time=now, step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def wandb_table(rows: Sequence[Cells]) -> dict[str, Any]:
    """The metric ``samples`` with a table of these samples; without samples, no metric."""
    if not rows:
        return {}
    import wandb

    data = [[table_cell(row, column) for column in COLUMNS] for row in rows]
    return {"samples": wandb.Table(columns=list(COLUMNS), data=data, allow_mixed_types=True)}


@contextlib.contextmanager
def public_command_line() -> Iterator[None]:
    """Hide secrets in ``sys.argv``, which W&B stores with the run. The supervisor and Ray do not read it meanwhile."""
    words = sys.argv
    sys.argv = redacted_words(words)
    try:
        yield
    finally:
        sys.argv = words


def start_wandb(args: Args, run_dir: RunDir) -> Any:
    """Log in to W&B and start the run; the caller logs with what is returned."""
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise MetricsError("--use-wandb: wandb is not installed; run pip install 'slime-rl[wandb]'") from error
    if args.wandb_host:
        os.environ["WANDB_BASE_URL"] = args.wandb_host
    if args.wandb_key:
        wandb.login(key=args.wandb_key, host=args.wandb_host)
    with public_command_line():
        run = wandb.init(
            entity=args.wandb_team,
            project=args.wandb_project or "slime",
            group=args.wandb_group,
            name=run_dir.path.name,
            id=args.wandb_run_id,
            resume="allow" if args.wandb_run_id else None,
            mode=args.wandb_mode,
            dir=args.wandb_dir or str(run_dir.path),
            config=public_settings(vars(args)),
        )
    axis = "train/step" if args.wandb_always_use_train_step else "rollout/step"
    for key in STEP_KEYS:
        wandb.define_metric(key)
    for group in ("train", "rollout", "perf", "passrate", "multi_turn", "eval"):
        own = "eval/step" if group == "eval" and axis == "rollout/step" else axis
        wandb.define_metric(f"{group}/*", step_metric=own)
    return run
