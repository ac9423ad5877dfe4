"""Repeat the loop of a run from its last snapshot with new training ranks, while engines and
rollout manager stay.

A lost rank takes the state of the whole trainer with it. Engines, router, rollout manager and Ray
are started in a minute or more with a large model, and they are still there. Where this is not
possible, the driver is restarted (:mod:`slime.cluster.run`).
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from slime.cluster.actors import Supervised
from slime.cluster.run import RunEnd, answers, lost_parts
from slime.cluster.stop_signals import StopRequested
from slime.cluster.supervisor import REPORTS
from slime.config.data import DEFAULT_DATA_SOURCE
from slime.config.hooks import module_of_file

if TYPE_CHECKING:
    from slime.checkpoint.snapshot import Snapshot
    from slime.cluster.phases import Run
    from slime.cluster.start import Parts
    from slime.config.args import Args

MOST_WITHOUT_PROGRESS = 3
"""So often in a row the ranks are replaced without a new snapshot in between."""


def run_loop(args: Args, loop: Callable[[Args, Run], None], asynchronous: bool = False) -> None:
    """Open a run, call ``loop(args, run)``, and shut the run down at the end.

    If training ranks are lost, they are replaced if possible, and the loop is called again with a
    run that begins after the last snapshot. Every other error ends the run as
    :class:`~slime.cluster.run.RunEnd` describes.

    Args:
        asynchronous: Whether rollouts are generated while an earlier one trains
            (``train_async.py``).

    Raises:
        SystemExit: 130 or 143 after Ctrl-C or SIGTERM.
    """
    # Imported here, so that --help and a refused command line need neither numpy nor an HTTP
    # client.
    from slime.cluster.start import prepare, start

    parts = prepare(args, asynchronous)
    ranks = TrainingRanks()
    with RunEnd(parts):
        run = start(parts)
        while True:
            try:
                loop(args, run)
                return
            except Exception as error:
                following = recover(parts, error, ranks)
                if following is None:
                    raise
            run = following


def load_loop(name: str) -> ModuleType:
    """Import ``train.py`` or ``train_async.py``, which a wheel has in ``slime/cli/loops``, and a
    checkout at its top.

    Raises:
        FileNotFoundError: It is in neither place.
    """
    package = Path(__file__).resolve().parents[1]
    places = package / "cli" / "loops" / name, package.parent / name
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise FileNotFoundError(
            f"{name} is missing, neither {places[0]} nor {places[1]} exists: install slime again"
        )
    return module_of_file(f"slime_loop_{file.stem}", file)


@dataclass
class TrainingRanks(Supervised):
    """All training ranks of a run, which are replaced together; only losses since the newest
    snapshot count.
    """

    most_losses: int = MOST_WITHOUT_PROGRESS + 1
    losses_seconds: float = math.inf
    snapshot: int = -1

    def note_loss_after(self, snapshot: int, why: str) -> None:
        """Count a loss after which the run is to go on from the snapshot of rollout
        ``snapshot``.
        """
        if snapshot != self.snapshot:
            self.losses.clear()
        self.snapshot = snapshot
        self.note_loss(why)


def recover(parts: Parts, error: Exception, ranks: TrainingRanks) -> Run | None:
    """Replace the training ranks if only such were lost; returns the run that goes on.

    Returns:
        None if the code failed, or if the run must be restarted as a whole; then ``parts.lost``
        says what was lost, and a line was printed that says why the engines cannot stay.

    Raises:
        StopRequested: The user asked to stop meanwhile.
    """
    from slime.cluster.start import start_ranks_again

    run = parts.run
    log = parts.log
    if isinstance(error, StopRequested) or not REPORTS.attached or run is None:
        return None
    parts.lost = lost_parts(parts.actors(), error)
    if not parts.lost:
        return None
    began = time.monotonic()
    names = ", ".join(parts.lost)
    try:
        snapshot = newest_snapshot(parts, run)
        reason = obstacle(run.args, parts.lost, snapshot, bool(parts.urls)) or _unwell(parts)
        if reason is None and snapshot is not None:
            ranks.note_loss_after(snapshot.iteration, names)
        if reason is None and ranks.hopeless:
            reason = (
                f"{MOST_WITHOUT_PROGRESS} times in a row, new ranks were lost before the next "
                "snapshot"
            )
        if reason is None and snapshot is not None:
            log.note("".join(traceback.format_exception(error)).rstrip())
            log.note(
                f"lost {names}: new training ranks go on from the snapshot of rollout "
                f"{snapshot.iteration}"
            )
            following = start_ranks_again(parts, parts.begin.again(snapshot))
            log.pending["perf/trainer_restart_count"] = 1.0
            log.note(
                f"training ranks were replaced in {time.monotonic() - began:.0f} s; the engines "
                "stayed"
            )
            parts.lost = []
            return following
    except StopRequested:
        raise
    except Exception as failure:  # whatever it is, a restart of the whole run does not depend on it
        reason = f"{type(failure).__name__}: {str(failure).strip().rpartition(chr(10))[2]}"
    parts.run = run  # it is not usable, but says which snapshot the restart begins with
    log.note(f"the engines cannot stay while training ranks are replaced: {reason}")
    return None


def newest_snapshot(parts: Parts, run: Run) -> Snapshot | None:
    """The newest snapshot of this run: one that this process has committed, or the one from which
    it began.
    """
    from slime.checkpoint.snapshot import latest

    if run.snapshots.saved != parts.begin.trained and run.snapshots.folder is not None:
        return latest(run.snapshots.folder)
    return parts.begin.snapshot if parts.begin.resumes else None


def obstacle(
    args: Args, lost: Sequence[str], snapshot: Snapshot | None, engines: bool
) -> str | None:
    """Why the training ranks cannot be replaced while the engines stay; None if they can.

    Args:
        lost: Names of the lost parts, from :func:`~slime.cluster.run.lost_parts`.
        snapshot: The newest one of the run.
        engines: Whether the run has started engines.
    """
    from slime.cluster.rollout_state import OWN_FUNCTIONS

    others = [name for name in lost if "'s rank " not in name and not name.startswith("an answer")]
    if others:
        return f"{', '.join(others)} was lost"
    if snapshot is None:
        return "there is no snapshot yet (--save-interval)"
    if not engines:
        return "the run has none"
    if args.rollout_external_engine_addrs:
        return "they are not the run's own (--rollout-external-engine-addrs)"
    if args.colocate or args.offload_train or args.offload_rollout:
        return (
            "they share accelerators with the ranks (--colocate), and who has the memory is not "
            "known"
        )
    if args.data_source_path != DEFAULT_DATA_SOURCE:
        return "the data source is not the built-in one (--data-source-path)"
    if args.rollout_function_path not in OWN_FUNCTIONS or args.load_debug_rollout_data:
        return (
            "the rollout function is not a built-in one (--rollout-function-path), so a rollout "
            "cannot be undone"
        )
    if args.replay_schedule:
        return "a schedule is repeated (--replay-schedule)"
    return None


def _unwell(parts: Parts) -> str | None:
    if parts.manager is None or not answers(parts.manager.handle):
        return "the rollout manager does not answer"
    return None
