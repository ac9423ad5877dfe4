"""Compute a recorded training step again, and compare it with the run (``slime replay``). Here is what
the folder of a run holds for that.
"""

from __future__ import annotations

import glob
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from slime.checkpoint.snapshot import Snapshot, kind, snapshots
from slime.cli.command import CommandError
from slime.config.parser import ConfigError, load_args, read_command_line
from slime.observability.metrics import MetricsError, read_metrics
from slime.observability.run_dir import RunDir
from slime.observability.run_state import SentWeights, Settled

from ..summary import (
    Attempt,
    lineage,
    no_run,
    read_attempts,
    read_weights,
)
from .settings import RUNS_CODE, Recorded, recorded_settings

if TYPE_CHECKING:
    from slime.config.args import Args


class ReplayError(CommandError):
    """A step cannot be computed again. The message says what is missing, and what can be replayed
    instead.
    """


@dataclass(frozen=True)
class RecordedRun:
    """The records of a run, as one of its steps needs them.

    Attributes:
        args: The settings with which the step was trained, with the changes of the caller.
        settled: What the start of the attempt that trained the step has settled.
        begins: The first rollout of each attempt, with the snapshot from which it began.
        earliest: The first rollout of the attempt that trained the step.
        changes: The settings that the caller has changed, by name.
        template: The path of the rollouts' dumps, with ``{rollout_id}``.
        dumps: The rollouts whose dumps exist.
        snapshots: The snapshots of the run by their last trained rollout.
        steps: The rows of metrics by rollout.
        weights: The weights that were sent to the engines, by the number of rollouts that had
            trained them.
        modules: The folders in which the processes look for modules of functions, after all others.
        unrecorded: The environment variables of the run whose values are not known.
    """

    folder: Path
    args: Args
    settled: Settled
    begins: Mapping[int, str | None]
    earliest: int
    changes: Mapping[str, object]
    template: str
    dumps: frozenset[int]
    snapshots: Mapping[int, Snapshot]
    steps: Mapping[int, Mapping[str, float | None]]
    weights: Mapping[int, SentWeights]
    modules: tuple[str, ...] = ()
    unrecorded: tuple[str, ...] = ()

    def starts(self) -> set[int]:
        """Return the rollouts before which the state of the trainer is known: after a snapshot, and
        at the start.
        """
        # --save-keep-last may have removed what an attempt loaded.
        begins = {
            first
            for first, loaded in self.begins.items()
            if loaded is None or Path(loaded).is_dir()
        }
        return begins | {number + 1 for number in self.snapshots}

    def replayable(self) -> list[int]:
        """Return the rollouts whose dump and whose state before the step exist."""
        return sorted(self.dumps & self.starts())

    def start_of(self, step: int, through: bool) -> int:
        """Return the first rollout to train in order to replay ``step``.

        Args:
            through: Whether earlier steps may be trained again if there is no snapshot right before
                ``step``.

        Raises:
            ReplayError: A dump or a snapshot is missing.
        """
        if step not in self.dumps:
            raise ReplayError(
                f"there is no dump of the samples of step {step} ({self.template}): "
                f"{_listed(self.replayable())}"
            )
        # States from which all steps up to this one have dumps. Steps of an earlier attempt may
        # have had other settings.
        starts = [
            start
            for start in self.starts()
            if self.earliest <= start <= step and set(range(start, step)) <= self.dumps
        ]
        if not starts or (max(starts) != step and not through):
            more = ""
            if starts:
                more = (
                    f", or add --through to train {steps_text(max(starts), step)} again before it"
                )
            raise ReplayError(
                f"there is no snapshot of the state before step {step} (after step {step - 1}): "
                f"{_listed(self.replayable())}{more}"
            )
        return max(starts)

    def state_before(self, start: int) -> Path | None:
        """Return the snapshot folder of the state before rollout ``start``; None for the initial
        weights.
        """
        if start - 1 in self.snapshots:
            return self.snapshots[start - 1].path
        loaded = self.begins.get(start)
        return Path(loaded) if loaded is not None else None

    def args_from(self, start: int) -> Args:
        """Return the settings with which the state before rollout ``start`` is loaded."""
        if start - 1 not in self.snapshots:
            return self.args
        # The run's own snapshots hold all of its state, also if the run itself began with the
        # weights of another one.
        return self.args.with_values(finetune=False, no_load_optim=False, no_load_rng=False)


def steps_text(first: int, end: int) -> str:
    """Return a text for steps ``first`` to ``end - 1``."""
    return f"steps {first} to {end - 1}" if end - first > 1 else f"step {first}"


def _listed(steps: Sequence[int]) -> str:
    if not steps:
        return (
            "no step of this run can be replayed; a run must have --save-debug-rollout-data (or "
            "--dump-details) and --save-interval"
        )
    return f"these steps can be replayed: {', '.join(map(str, steps))}"


def attempts_of(folder: Path) -> list[Attempt]:
    """Return the attempts that made the steps of a run, in the order of their steps.

    Raises:
        ReplayError: The folder has no readable record of them.
    """
    attempts = lineage(read_attempts(RunDir(folder)))
    if not attempts:
        name = RunDir(folder).attempts.name
        raise ReplayError(
            f"{folder} has no readable {name}: the run is of an older release, or never began"
        )
    return attempts


def attempt_of(attempts: Sequence[Attempt], step: int) -> Attempt:
    """Return the attempt that trained a step; the first one for a step before it."""
    return next(
        (one for one in reversed(attempts) if one.settled.first_rollout <= step), attempts[0]
    )


def read_run(
    folder: Path,
    step: int,
    flags: Sequence[str] = (),
    run_its_code: Callable[[Sequence[str]], None] | None = None,
) -> RecordedRun:
    """Read the folder of a run, with the settings that were in force at a step.

    Args:
        flags: Flags of train.py that replace settings of the run, for example for another layout.
        run_its_code: Allows code that the folder names, and is called before with a line for each
            setting and file.

    Raises:
        ReplayError: The folder is not that of a run, it names code that is not allowed, or the
            flags are wrong.
    """
    run = RunDir(folder)
    if not run.config.is_file():
        raise ReplayError(no_run(folder))
    # What the run recorded: its metrics, and the attempt that trained the step.
    try:
        rows = read_metrics(run.metrics) if run.metrics.is_file() else []
    except MetricsError as error:
        raise ReplayError(str(error)) from error
    attempts = attempts_of(folder)
    chosen = attempt_of(attempts, step)
    if (template := template_of(chosen)) is None:
        raise ReplayError(f"{folder} has no dumps of its samples: {_listed([])}")
    # Only data is taken from the folder. Code that it names runs with the consent of the caller.
    settled = chosen.settled
    changes = _changes(flags)
    directory = Path(settled.working_directory)
    recorded = _recorded(chosen, changes)
    modules = [os.getcwd()] if RUNS_CODE & changes.keys() else []
    if _its_code_runs(list(recorded.lines(directory)), run_its_code):
        modules.append(str(directory))
    sys.path.extend(modules)
    args = _arguments(recorded, changes, template, settled.asynchronous)
    if (given := set(changes.get("train_env_vars", ()))) == set(recorded.unrecorded):
        changes.pop("train_env_vars", None)  # no change: what the run had, and did not record
    return RecordedRun(
        folder=folder,
        args=args.with_values(**_settled(settled, changes)),
        settled=settled,
        begins={one.settled.first_rollout: _loaded(one.settled) for one in attempts},
        earliest=settled.first_rollout,
        changes=changes,
        template=template,
        dumps=_all_dumps(attempts),
        snapshots=_all_snapshots(attempts),
        steps={
            int(row["rollout/step"]): row for row in rows if row.get("rollout/step") is not None
        },
        weights=read_weights(run.weights),
        modules=tuple(modules),
        unrecorded=() if given else recorded.unrecorded,
    )


def _recorded(attempt: Attempt, changes: Collection[str]) -> Recorded:
    """Return the recorded settings of an attempt, without code that is changed by the caller."""
    directory = Path(attempt.settled.working_directory)
    recorded = recorded_settings(attempt.settings, directory, f"{__name__}.{stand_in.__name__}")
    for name in changes:
        recorded.code.pop(name, None)
    typed = attempt.settings.get("explicit")
    if not isinstance(typed, list) or "compile_layers" not in typed:
        # It follows from the machine, and as a typed flag excludes --true-on-policy.
        recorded.data.pop("compile_layers", None)
    return recorded


def _its_code_runs(
    lines: Sequence[str], run_its_code: Callable[[Sequence[str]], None] | None
) -> bool:
    """Return whether the step runs code that the folder names, ``lines``; refuse it unless the
    caller allows it.
    """
    if not lines:
        return False
    if run_its_code is None:
        said = (
            "the step ran code that the folder of the run names, which a replay runs with your "
            "rights:"
        )
        hint = "Read it, then add --run-its-code, or replace these settings by flags of your own"
        raise ReplayError("\n  ".join([said, *lines]) + f"\n{hint}")
    run_its_code(lines)
    return True


def template_of(attempt: Attempt) -> str | None:
    """Return the path of an attempt's dumps of samples, with ``{rollout_id}``; None without any."""
    settings = attempt.settings
    template = settings.get("save_debug_rollout_data") or settings.get("load_debug_rollout_data")
    return str(Path(attempt.settled.working_directory) / str(template)) if template else None


def _loaded(settled: Settled) -> str | None:
    return (
        str(Path(settled.working_directory) / settled.loaded)
        if settled.loaded is not None
        else None
    )


def _ends(attempts: Sequence[Attempt]) -> Iterator[tuple[Attempt, int | None]]:
    """Yield each attempt with the rollout at which the next one took over; None for the last."""
    yield from zip(
        attempts, [*(one.settled.first_rollout for one in attempts[1:]), None], strict=True
    )


def _all_dumps(attempts: Sequence[Attempt]) -> frozenset[int]:
    rollouts: set[int] = set()
    for attempt, end in _ends(attempts):
        first = attempt.settled.first_rollout
        template = template_of(attempt)
        dumps = dumps_of(template) if template is not None else frozenset()
        rollouts |= {
            number for number in dumps if number >= first and (end is None or number < end)
        }
    return frozenset(rollouts)


def _all_snapshots(attempts: Sequence[Attempt]) -> dict[int, Snapshot]:
    """Return each snapshot that an attempt saved of the steps that count."""
    by_rollout: dict[int, Snapshot] = {}
    for attempt, end in _ends(attempts):
        first = attempt.settled.first_rollout
        save = attempt.settings.get("save")
        folder = Path(attempt.settled.working_directory) / str(save)
        for one in snapshots(folder) if save and folder.is_dir() else ():
            if one.iteration >= first and (end is None or one.iteration < end):
                by_rollout[one.iteration] = one
    return by_rollout


def _changes(flags: Sequence[str]) -> dict[str, Any]:
    """Return the settings that the flags change, by name."""
    given, problems = read_command_line(list(flags))
    if problems:
        raise ReplayError("\n".join(problems))
    changes = {name: value for name, value in vars(given).items() if name in given.explicit}
    return changes | dict(given.megatron)


def _settled(settled: Settled, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the start of the run has settled by its machine, which are taken and
    not those of this machine.
    """
    values: dict[str, Any] = {
        "num_rollout": settled.num_rollout,
        "threads_per_process": settled.threads,
        "max_tokens_per_gpu": settled.max_tokens,
        "log_probs_max_tokens_per_gpu": settled.forward_tokens,
    }
    return {name: value for name, value in values.items() if name not in changes}


def _arguments(
    recorded: Recorded, changes: Mapping[str, Any], template: str, asynchronous: bool
) -> Args:
    """Parse the settings of a run again, with changes, so that everything derived from them
    follows.
    """
    # Only the trainer runs, on the dump of the run.
    values = {**recorded.data, **(recorded.code | recorded.own if recorded.code else {})}
    values |= {"debug_train_only": True, "load_debug_rollout_data": template}
    values |= {"num_rollout": values.get("num_rollout") or 1, "async_save": False, "inline": False}
    values |= dict.fromkeys(("eval_interval", "save_interval"))
    # A folder of snapshots is no longer that of the start. The state comes from the snapshot before
    # the step.
    if values.get("load") and not _holds_weights(str(values["load"])):
        values |= {"load": None, "ckpt_step": None}
    values |= changes
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(values, file)
        file.flush()
        try:
            return load_args(["--custom-config-path", file.name], asynchronous=asynchronous)
        except ConfigError as error:
            raise ReplayError(
                f"the settings of the run do not fit this machine or the given flags:\n{error}"
            ) from error


def stand_in(*args: object, **keywords: object) -> None:
    """Stands for a function of generation; never called."""
    raise AssertionError("a replay generates nothing")


def _holds_weights(load: str) -> bool:
    path = Path(load).expanduser()
    return path.exists() and kind(path) not in ("snapshots", "iteration")


def dumps_of(template: str) -> frozenset[int]:
    """Return the rollouts of which there is a file."""
    before, placeholder, after = template.partition("{rollout_id}")
    if not placeholder:
        return frozenset()
    paths = glob.glob(f"{glob.escape(before)}*{glob.escape(after)}")
    numbers = (path[len(before) : len(path) - len(after)] for path in paths)
    return frozenset(int(number) for number in numbers if number.isdecimal())
