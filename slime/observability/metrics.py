"""The numbers of a run: its metrics, which go to ``metrics.jsonl`` and the trackers of ``--tracker``,
and the results of its evaluations, each a JSON file in the run folder and a table in the terminal.

A row of ``metrics.jsonl`` is ``{"<step key>": step, "time": wall seconds, "<name>": number, ...}``.
The step keys are ``train/step``, ``rollout/step`` and ``eval/step``.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

from slime.observability.files import AppendedFile, best_effort, regular, replacing
from slime.observability.run_dir import RunDir
from slime.observability.samples import KeptTexts, read_samples, sample_files
from slime.observability.trackers import Trackers

if TYPE_CHECKING:
    from rich.table import Table

    from slime.config.args import Args

_TABLE_ROWS = 8  # samples of a rollout in the table of a tracker
STEP_KEYS = ("train/step", "rollout/step", "eval/step")
REWARD_KEYS = ("rollout/raw_reward", "rollout/rewards")
"""The mean reward of a step is the first of these metrics that it has."""


class MetricsError(ValueError):
    """Raised if a metric is not a number, or if ``metrics.jsonl`` is missing or invalid."""


Row = dict[str, float | None]
"""One line of ``metrics.jsonl``. Numbers that are not finite are None."""


class MetricsLogger:
    """Writes metrics to all sinks. A run has one, in the driver.

    Args:
        args: The arguments of the run.
        run_dir: The folder of the run.
        resume_from: First step that a resumed run repeats. The rows of the interrupted run from
            this step on move to ``metrics-rolled-back.jsonl``.
        unattended: Whether the run goes on by itself after a loss. Then a tracker that cannot be
            started, because its server is down for example, is reported and left out.

    Raises:
        TrackerError: A tracker cannot be started.
        OSError: ``metrics.jsonl`` cannot be opened. Later, an error while writing is only logged
            and the run continues:
            rows wait in memory until there is space again.
    """

    def __init__(
        self, args: Args, run_dir: RunDir, resume_from: int | None = None, unattended: bool = False
    ) -> None:
        self._warned: set[str] = set()
        # Before the file is opened for appending: it is replaced.
        if resume_from is not None:
            roll_back(run_dir.metrics, resume_from)
        self._rows = AppendedFile(run_dir.metrics, "metrics.jsonl")
        self._trackers = Trackers(args, run_dir.path, resume_from, unattended)
        self._run = run_dir.path

    def log(
        self, metrics: Mapping[str, SupportsFloat], step: int, step_key: str = "rollout/step"
    ) -> None:
        """Write one row.

        Args:
            metrics: Numbers by name (Python or NumPy numbers, or tensors with one element).
            step: Number of the rollout.
            step_key: Name of the x-axis, one of :data:`STEP_KEYS`.

        Raises:
            MetricsError: A value is not a number, or the step key is unknown.
        """
        if step_key not in STEP_KEYS:
            raise MetricsError(f"unknown step key {step_key!r}: use one of {', '.join(STEP_KEYS)}")
        # Every number is checked before anything is written, so that a row is written whole or not
        # at all.
        numbers = {name: self._number(name, value) for name, value in metrics.items()}
        row: Row = {step_key: step, "time": round(time.time(), 3)}
        # A metric must not replace the step or the time of the row.
        row |= {
            name: value if math.isfinite(value) else None
            for name, value in numbers.items()
            if name not in row
        }
        self._rows.write(json.dumps(row, allow_nan=False))
        self._trackers.log(numbers, step, step_key)
        if step_key == "rollout/step" and self._trackers.take_samples:
            self._trackers.samples(self._shown(step), step)

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
                print(
                    f"metric {name} is {number} (null in metrics.jsonl; reported once)",
                    file=sys.stderr,
                    flush=True,
                )
        return number

    def close(self, failed: bool = False) -> None:
        """Flush and close all sinks. It is safe to call this twice.

        Args:
            failed: Whether an error ended the run, which trackers show.
        """
        self._rows.close()
        self._trackers.close(failed)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all rows of a ``metrics.jsonl``. An incomplete last line, which is being written, is
    left out.

    Raises:
        MetricsError: The file cannot be read, or a row is not a JSON object of numbers.
    """
    return [row for _, row in _rows(path)]


def roll_back(path: Path, step: int) -> int:
    """Move the rows of steps ``>= step`` from ``metrics.jsonl`` to another file, and return their
    number.

    Afterwards the file of an interrupted and resumed run is the same as that of an uninterrupted
    one.
    """
    if not path.exists():
        return 0
    # A row belongs to the resumed run if any of its steps does; most rows have one step only.
    keep: list[str] = []
    gone: list[str] = []
    for line, row in _rows(path):
        (gone if any(row.get(key, -1) >= step for key in STEP_KEYS) else keep).append(line)
    # these rows are written before they are removed, so that an interruption cannot lose them
    if gone:
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
        raise MetricsError(
            f"{path} is damaged: it is not UTF-8 ({error.reason} at byte {error.start})"
        ) from error
    # A run that goes on, or that was killed, may have written a part of its last line.
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
    return (
        value is None or type(value) is float or (type(value) is int and -(2**63) <= value < 2**63)
    )


DETAIL = re.compile(
    r"^(?P<name>.+)-(?P<figure>truncated_ratio|reward_missing_count|(?:pass|mean)@\d+)$"
)
"""Splits the name of a metric without ``eval/`` into data set and figure. Other names are a data
set's mean reward.
"""

Figures = dict[str, dict[str, SupportsFloat]]


def figures(metrics: Mapping[str, SupportsFloat]) -> Figures:
    """Return the metrics of an evaluation by data set: ``reward``, ``mean@n``, ``pass@k``,
    ``truncated_ratio``, lengths and others. The name of a data set may have slashes, if its reward
    is there and figures of its own follow it."""
    found: Figures = {}
    values = {
        key.removeprefix("eval/"): value
        for key, value in metrics.items()
        if key.startswith("eval/")
    }
    values.pop("step", None)
    # A name with a slash could also be a figure of another data set; it is a data set if figures of
    # its own follow.
    slashed = {
        key for key in values if "/" in key and any(other.startswith(f"{key}/") for other in values)
    }
    for key, value in values.items():
        detail = DETAIL.match(key)
        if detail and ("/" not in key or detail["name"] in slashed):
            found.setdefault(detail["name"], {})[detail["figure"]] = value
            continue
        # The longest name wins, since the name of one data set may begin with that of another.
        own = [name for name in slashed if key == name or key.startswith(f"{name}/")]
        name = max(own, key=len, default=key.partition("/")[0])
        found.setdefault(name, {})[key.removeprefix(name).removeprefix("/") or "reward"] = value
    return found


def write_evaluation(
    run_dir: Path,
    step: int,
    data: Mapping[str, Mapping[str, object]],
    metrics: Mapping[str, SupportsFloat],
) -> Path:
    """Write ``<run>/eval/eval_<step>.json``, which replaces an older file. If the file cannot be
    written, this is logged and the run continues, because the figures are also in
    ``metrics.jsonl``.

    For each data set, the file contains its figures, the settings of the evaluation, and the
    rewards of each prompt in the order of the data file (null if a verifier gave no answer). The
    samples themselves are in ``samples/``.

    Args:
        step: Number of rollouts that were trained before this evaluation.
        data: ``data`` of ``RolloutFnEvalOutput``.
        metrics: The logged metrics of the evaluation.
    """
    # Figures, settings and rewards are put together for each data set.
    by_name = figures(metrics)
    sets = {
        name: {
            "metrics": {
                figure: _finite(value) if isinstance(value, SupportsFloat) else value
                for figure, value in by_name.get(name, {}).items()
            },
            "settings": part.get("settings") or {},
            "rewards": _rewards(part),
        }
        for name, part in data.items()
    }
    path = Path(run_dir) / "eval" / f"eval_{step:06d}.json"
    text = json.dumps({"step": step, "datasets": sets}, indent=1, default=str) + "\n"
    with best_effort("the evaluation's file"), replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def _rewards(part: Mapping[str, object]) -> list[list[float | None]]:
    """Return the rewards of each prompt."""
    # The dict may come from an evaluation function of the user's.
    rewards = part["rewards"]
    n = part.get("n_samples_per_prompt") or 1
    if not isinstance(rewards, Iterable) or not isinstance(n, int):
        raise TypeError(
            f"invalid evaluation: rewards {rewards!r:.80}, n_samples_per_prompt {n!r:.80}"
        )
    values = [_finite(reward) for reward in rewards]
    return [values[i : i + n] for i in range(0, len(values), n)]


def _finite(value: SupportsFloat) -> float | None:
    """Return a number of any kind as a float; None for NaN and infinities, which JSON does not
    have.
    """
    number = float(value)
    return number if math.isfinite(number) else None


def evaluation_table(step: int, by_name: Figures) -> Table:
    """Return a table with one row per data set: reward, pass@k, share of truncated responses, mean
    length, and the number of missing rewards."""
    from rich.table import Table

    # Columns exist only if some data set has a value for them.
    ks = sorted(
        {int(key[5:]) for row in by_name.values() for key in row if key.startswith("pass@")}
    )
    unanswered = any(row.get("reward_missing_count") for row in by_name.values())
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold magenta")
    table.add_column(f"eval at {step}", no_wrap=True)
    for title in (
        "reward",
        *(f"pass@{k}" for k in ks),
        "cut",
        "length",
        *["no answer"] * unanswered,
    ):
        table.add_column(title, justify="right")
    for name, row in by_name.items():
        cells = [
            _cell(row.get("reward"), "{:.3f}"),
            *(_cell(row.get(f"pass@{k}"), "{:.3f}") for k in ks),
        ]
        cells += [
            _cell(row.get("truncated_ratio"), "{:.0%}"),
            _cell(row.get("response_len/mean"), "{:.1f}"),
        ]
        cells += [_cell(row.get("reward_missing_count"), "{:.0f}")] * unanswered
        table.add_row(name, *cells)
    return table


def _cell(value: SupportsFloat | None, form: str) -> str:
    return "" if value is None else form.format(float(value))
