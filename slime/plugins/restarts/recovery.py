"""Replace training ranks while engines and rollout manager stay, or let the driver be started again.

A lost rank takes the state of the whole trainer with it. Engines, router, rollout manager and Ray
are started in a minute or more with a large model, and they are still there. Where this is not
possible, the driver ends the remaining processes and asks its supervisor to execute the command
line again.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from slime.cluster.actors import ActorError, ActorHandle, ActorLost, Ref, Supervised, door
from slime.cluster.ray_wait import NoStatus, WaitExpired
from slime.cluster.run import answers
from slime.cluster.stop_signals import REPORTS, StopRequested
from slime.config.data import DEFAULT_DATA_SOURCE
from slime.config.rollout import OWN_FUNCTIONS
from slime.plugins.restarts.supervisor import Settings, supervise

if TYPE_CHECKING:
    from slime.checkpoint.snapshot import Snapshot
    from slime.cluster.phases import Run
    from slime.cluster.snapshots import StartingPoint
    from slime.cluster.start import Parts

MOST_WITHOUT_PROGRESS = 3
"""So often in a row the ranks are replaced without a new snapshot in between."""
ASK_SECONDS = 5.0
END_SECONDS = 180.0
"""For the generation in progress to end, when the run goes back to a snapshot."""
LOST_CODE = 75  # EX_TEMPFAIL: the exit code of a driver that asks to be run again


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


class Restarts:
    """What follows a loss in one run.

    Attributes:
        ranks: How often the ranks were lost.
        lost: Names of lost parts that could not be replaced, so that the run must be restarted.
    """

    supervise = staticmethod(supervise)

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.ranks = TrainingRanks()
        self.lost: list[str] = []

    def begin(self) -> None:
        args = self.parts.args
        began = Settings(
            max_restarts=args.max_restarts or 0,
            status_timeout=args.status_timeout,
            save=args.save,
            run_name=args.run_name,
            output_dir=args.output_dir,
        )
        # From now on, the supervisor treats an end of this process without a report as a loss (kill
        # -9, say).
        REPORTS.tell(began=began)

    def replace(self, error: Exception) -> Run | None:
        """Replace the training ranks if only such were lost; returns the run that goes on.

        Returns:
            None if the code failed, or if the run must be restarted as a whole; then a line was
            printed that says why the engines cannot stay.

        Raises:
            StopRequested: The user asked to stop meanwhile.
        """
        parts = self.parts
        run = parts.run
        log = parts.log
        if isinstance(error, StopRequested) or not REPORTS.attached or run is None:
            return None
        self.lost = lost_parts(actors_of(parts), error)
        if not self.lost:
            return None
        began = time.monotonic()
        names = ", ".join(self.lost)
        try:
            snapshot = newest_snapshot(parts, run)
            reason = self.obstacle(snapshot) or _unwell(parts)
            if reason is None and snapshot is not None:
                self.ranks.note_loss_after(snapshot.iteration, names)
                if self.ranks.hopeless:
                    reason = (
                        f"{MOST_WITHOUT_PROGRESS} times in a row, new ranks were lost before the "
                        "next snapshot"
                    )
                else:
                    log.note("".join(traceback.format_exception(error)).rstrip())
                    log.note(
                        f"lost {names}: new training ranks go on from the snapshot of rollout "
                        f"{snapshot.iteration}"
                    )
                    following = start_ranks_again(parts, again(parts.begin, snapshot))
                    log.pending["perf/trainer_restart_count"] = 1.0
                    log.note(
                        f"training ranks were replaced in {time.monotonic() - began:.0f} s; the "
                        "engines stayed"
                    )
                    self.lost = []
                    return following
        except StopRequested:
            raise
        # whatever it is, a restart of the whole run does not depend on it
        except Exception as failure:
            reason = f"{type(failure).__name__}: {str(failure).strip().rpartition(chr(10))[2]}"
        parts.run = run  # it is not usable, but says which snapshot the restart begins with
        log.note(f"the engines cannot stay while training ranks are replaced: {reason}")
        return None

    def obstacle(self, snapshot: Snapshot | None) -> str | None:
        """Why the training ranks cannot be replaced while the engines stay; None if they can.

        Args:
            snapshot: The newest one of the run.
        """
        args = self.parts.args
        others = [
            name
            for name in self.lost
            if "'s rank " not in name and not name.startswith("an answer")
        ]
        if others:
            return f"{', '.join(others)} was lost"
        if snapshot is None:
            return "there is no snapshot yet (--save-interval)"
        if not self.parts.urls:
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

    def restarts(self, error: Exception) -> bool:
        """Return whether the run can continue from its last snapshot; if so, print the error, what
        was lost, where the run continues, and how many restarts are left after this one.
        """
        parts = self.parts
        most = parts.args.max_restarts or 0
        if not most or not REPORTS.attached:
            return False
        # After a failed attempt to replace ranks, the new ones may answer.
        lost = self.lost or lost_parts(actors_of(parts), error)
        if not lost:
            return False
        saved = parts.run.snapshots.saved if parts.run is not None else None
        where = "from where it began" if saved is None else f"from the snapshot of rollout {saved}"
        parts.log.note("".join(traceback.format_exception(error)).rstrip())
        parts.log.note(
            f"lost {', '.join(lost)}: going on {where} ({most - 1} more restarts, --max-restarts)"
        )
        return True

    def leave(self) -> NoReturn:
        """End this driver after its shutdown, with the exit code that stands for a lost run."""
        # os._exit flushes nothing and runs no exit handlers.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # nobody reads it any more, or its disk is full
                stream.flush()
        os._exit(LOST_CODE)


def again(begin: StartingPoint, snapshot: Snapshot) -> StartingPoint:
    """Return where this process goes on after it has lost training ranks.

    The attempt is a new one also if the snapshot is the same as the last time: the engines have the
    weights of the attempt that is undone, and may not take others for them.
    """
    trained = snapshot.iteration
    attempt = max(begin.attempt, int(snapshot.manifest["attempt"])) + 1
    return replace(
        begin,
        snapshot=snapshot,
        resumes=True,
        trained=trained,
        first_rollout=trained + 1,
        attempt=attempt,
    )


def newest_snapshot(parts: Parts, run: Run) -> Snapshot | None:
    """The newest snapshot of this run: one that this process has committed, or the one from which
    it began.
    """
    from slime.checkpoint.snapshot import latest

    if run.snapshots.saved != parts.begin.trained and run.snapshots.folder is not None:
        return latest(run.snapshots.folder)
    return parts.begin.snapshot if parts.begin.resumes else None


def _unwell(parts: Parts) -> str | None:
    if parts.manager is None or not answers(parts.manager.handle):
        return "the rollout manager does not answer"
    return None


def start_ranks_again(parts: Parts, begin: StartingPoint) -> Run:
    """Replace all training ranks of a started run, and let it go on from a snapshot; engines and
    manager stay.

    Ranks that are alive are replaced as well: their weights are newer than the snapshot, and their
    process groups include the lost ones.

    Raises:
        NotEnded: A rank cannot be ended, so it may hold the accelerator of its successor.
        ActorError: The rollout manager could not go back to the snapshot, or a new rank did not
            start.
        WaitExpired: One of them did not do so in time.
    """
    from slime.cluster.rollout_manager import RolloutManager
    from slime.cluster.snapshots import restore_rollouts
    from slime.cluster.start import begin_run, open_records, start_training, trainer_of
    from slime.weights.transports.shared_memory import sweep_shared_memory

    run = parts.run
    manager = parts.manager
    placement = parts.placement
    log = parts.log
    assert run and manager and placement, "the start is complete"
    # Without it, a stop request does not save: the snapshot is the newest state that there is.
    parts.run = None
    with log.phase("replace_ranks"):
        # What is left of the ranks and of the rollouts that are undone.
        for group in parts.groups:
            group.end()
        manager.wait(
            manager.start(RolloutManager.rewind), "the generation in progress to end", END_SECONDS
        )
        sweep_shared_memory()

        # New ranks. The first arguments chose where the run began; as for restarts, that is the
        # snapshot now.
        if begin.snapshot is not parts.begin.snapshot:
            first = {
                "load": parts.args.save,
                "ckpt_step": None,
                "start_rollout_id": None,
                "finetune": False,
            }
            parts.args = parts.args.with_values(**first)
        parts.begin = begin
        parts.groups = []
        start_training(parts, placement)
        for group in parts.groups:
            group.load()
        # while the ranks load the snapshot
        restore_rollouts(parts, manager)
        for group in parts.groups:
            group.wait_started()
        trainer = trainer_of(parts)
        log.close_metrics()
        parts.unattended = True
        metrics = open_records(parts, placement)
    return begin_run(parts, manager, trainer, run.pool.urls, metrics)


# --- what was lost -------------------------------------------------------------------------------


def actors_of(parts: Parts) -> dict[str, ActorHandle]:
    """Return the actors that hold the run's state, by the name that a message uses for them."""
    named = {"the rollout manager": parts.manager.handle} if parts.manager is not None else {}
    for group in parts.groups:
        named |= {
            f"the {group.role}'s rank {number}": rank for number, rank in enumerate(group.ranks)
        }
    return named


def lost_parts(actors: Mapping[str, ActorHandle], error: Exception) -> list[str]:
    """Names of the parts of a failed run that died or do not answer.

    The list is empty if the code itself failed: the same error would come again after a restart.

    Args:
        actors: The actors that hold the run's state, by the name that a message uses for them.
    """
    try:
        return _lost_actors(actors, error) if door().connected else []
    except (RuntimeError, OSError):  # The cluster itself does not answer.
        from_cluster = isinstance(error, ActorError | WaitExpired | OSError)
        return [f"the Ray cluster ({type(error).__name__})"] if from_cluster else []


def _lost_actors(actors: Mapping[str, ActorHandle], error: Exception) -> list[str]:
    # All actors are asked at the same time, so the question takes ASK_SECONDS even if many of them
    # are silent.
    asked = {actor.status.remote(): name for name, actor in actors.items()}
    if not asked:
        return []
    answered, silent = door().wait(list(asked), ASK_SECONDS)
    lost = [asked[answer] for answer in answered if _has_died(answer)]
    # A silent actor counts only if a wait expired. If every actor answers, an expired wait is not a
    # loss: the same work would not be faster after a restart.
    if isinstance(error, WaitExpired):
        lost += [f"{asked[ref]} (which does not answer)" for ref in silent]
    # An actor was lost, even if every actor answers by now: it may have been unreachable only for a
    # while.
    failed_to_start = isinstance(error, ActorLost) and error.at_creation
    if not lost and isinstance(error, ActorLost | NoStatus) and not failed_to_start:
        return [f"an answer ({type(error).__name__})"]
    return lost


def _has_died(answer: Ref[object]) -> bool:
    try:
        door().get([answer])
    except ActorLost as error:
        return not error.at_creation
    except Exception:  # The call failed for another reason, so the actor is alive.
        return False
    return False
