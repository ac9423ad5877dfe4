"""The snapshots of one run: the one from which it resumes, and those that it writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from slime.backends.lr_schedule import LrSchedule, planned_steps
from slime.checkpoint import snapshot
from slime.checkpoint.files import FileEntry, FolderTrial, is_full, wait_for_room
from slime.checkpoint.manifest import (
    Facts,
    Manifest,
    RunFacts,
    changes,
    check_same_prompts,
    settings,
)
from slime.cluster.folders import snapshot_of
from slime.cluster.rollout_manager import RolloutManager
from slime.cluster.stop_signals import REPORTS, StopRequested, StopSignals
from slime.config.args import FLAGS
from slime.config.passthrough import Attributes
from slime.config.run import CheckpointConfig
from slime.config.settings import to_dict

if TYPE_CHECKING:
    from slime.checkpoint.snapshot import Snapshot
    from slime.cluster.engine_pool import EnginePool
    from slime.cluster.phases import StepLog
    from slime.cluster.ray_wait import ManagerClient
    from slime.cluster.start import Parts
    from slime.cluster.train_group import TrainGroup
    from slime.cluster.trainer import Trainer
    from slime.types import JsonObject

T = TypeVar("T")


@dataclass(frozen=True)
class StartingPoint:
    """Where a run begins.

    Attributes:
        snapshot: The snapshot to resume from, or to take only the weights from (``--finetune``);
            None without one.
        resumes: Whether this run continues the run that wrote the snapshot.
        trained: The last rollout that a resumed run had trained; None in a new run.
        first_rollout: The first rollout of this process.
        attempt: How often the run has been resumed.
    """

    snapshot: Snapshot | None = None
    resumes: bool = False
    trained: int | None = None
    first_rollout: int = 0
    attempt: int = 0

    @classmethod
    def of(cls, flags: CheckpointConfig, start_rollout_id: int | None = None) -> StartingPoint:
        """Read the manifests below ``--load``."""
        snapshot = snapshot_of(flags.load, flags.ckpt_step)
        first = start_rollout_id or 0
        if snapshot is None or flags.finetune:
            return cls(snapshot, first_rollout=first)
        trained = snapshot.iteration
        if start_rollout_id is None:
            first = trained + 1
        return cls(snapshot, True, trained, first, int(snapshot.manifest["attempt"]) + 1)

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of the snapshot that the run continues; None in a new run."""
        return self.snapshot.manifest if self.snapshot is not None and self.resumes else None


def settings_of(attributes: Attributes) -> JsonObject:
    """Those attributes of the arguments that determine the result of a run, without settings that
    control logging and debugging.
    """
    shown = {
        name
        for name, flag in FLAGS.items()
        if flag.group in ("observability", "debugging and profiling")
    }
    return settings(
        {name: value for name, value in to_dict(attributes).items() if name not in shown}
    )


def restore_rollouts(parts: Parts, manager: ManagerClient) -> None:
    """Restore the data source of a resumed run in the rollout manager, and warn about settings that
    have changed.

    Raises:
        ResumeError: With these settings, the prompts would come in a different order.
    """
    begin = parts.begin
    args = parts.args
    log = parts.log
    if args.load and not Path(args.load).exists():
        log.note(f"--load {args.load} does not exist: the run begins without it")
    if begin.snapshot is None or not begin.resumes:
        return
    path = begin.snapshot.path
    trained = begin.snapshot.iteration
    manager.call(
        "the data source to be restored",
        RolloutManager.load_state,
        trained,
        path,
        begin.attempt,
    )
    log.note(f"resumed from {path}: going on with rollout {trained + 1}")
    if args.num_rollout and trained + 1 >= args.num_rollout:
        log.note("warning: nothing is left to train; a larger --num-rollout goes on")
    # In a different order of prompts, some groups would be used twice and others never, so that is
    # an error. Any other change may be intended.
    then = begin.snapshot.manifest.get("settings", {})
    check_same_prompts(then, parts.settings)
    before = then.get("num_rollout")
    now = parts.settings | {"num_rollout": before}
    # A new length is told if it changes the learning rate.
    if isinstance(before, int) and before != args.num_rollout:
        step = planned_steps(args.with_values(num_rollout=trained + 1))
        old = LrSchedule.from_args(args.with_values(num_rollout=before))
        if change := _change_of_schedule(old, LrSchedule.from_args(args), step):
            now["num_rollout"] = f"{args.num_rollout} ({change})"
    if changed := changes(then, now):
        log.note(f"warning: settings that differ from the saved run's: {'; '.join(changed)}")


def _change_of_schedule(old: LrSchedule, new: LrSchedule, step: int) -> str | None:
    """Say how another schedule changes the learning rate of the optimizer steps from ``step`` on;
    None if it does not.
    """
    if old == new or (old.style == "constant" and old.warmup_steps == new.warmup_steps):
        return None
    return (
        f"learning rate of the next step: {old.lr(step):.3g} -> {new.lr(step):.3g}; "
        "--lr-decay-iters fixes its decay"
    )


def check_save_folder(folder: Path, manager: ManagerClient, groups: list[TrainGroup]) -> None:
    """Check that every process that writes snapshots can reach the folder in which the driver
    commits them.

    This runs while the models are still being loaded, so that a wrong folder is reported as early
    as possible.

    Raises:
        FolderError: Some processes do not see the folder; the message names them and their nodes.
    """
    with FolderTrial(folder) as trial:
        path = str(trial.folder)
        of_manager = manager.call(
            "to look into --save", RolloutManager.try_folder, path, trial.token
        )
        answers = {"rollout manager": of_manager}
        for group in groups:
            answers |= group.try_folder(path, trial.token)
        trial.check(answers)


@dataclass
class Snapshots:
    """Writes snapshots: all ranks and the rollout manager write their parts, then one manifest
    commits them.

    Until the commit, the parts are in a temporary folder. A fault before it leaves the previous
    snapshot the newest.

    Attributes:
        facts: What manifests say about the run.
        saved: The rollout of the newest complete snapshot; at first that with which a resumed run
            began.
        folder: Where snapshots are written; None in a run without them.
    """

    settings: CheckpointConfig
    facts: RunFacts
    manager: ManagerClient
    trainer: Trainer
    pool: EnginePool
    log: StepLog
    stop: StopSignals
    saved: int | None = None
    # the temporary folder, and the content of its manifest
    _open: tuple[Path, Facts] | None = None

    def __post_init__(self) -> None:
        self.folder = Path(self.settings.save) if self.settings.save else None

    def save(self, rollout_id: int) -> None:
        """Write a snapshot of the state after rollout ``rollout_id``, and with ``--save-hf`` also
        the HF weights.

        With ``--async-save``, the ranks only copy their state here and write it while the run
        continues. The snapshot does not exist before :meth:`commit`.
        """
        folder = self.folder
        trainer = self.trainer
        assert folder is not None, "--save-interval implies --save"
        with self.log.phase("save_model"):
            self.commit()  # Only one snapshot is open at a time.
            # A stop request saves the same rollout again. In the middle of this save, it would
            # remove the folder to which ranks are still writing.
            with self.stop.deferred():
                temp = self._with_room(rollout_id, partial(snapshot.begin, folder, rollout_id))
                for group in trainer.groups:
                    trainer.take_turn(group)
                    self._with_room(rollout_id, partial(group.save, temp))
                save_rollouts = partial(
                    self.manager.call,
                    "the data source to be saved",
                    RolloutManager.save_state,
                    rollout_id,
                    temp,
                )
                ahead = self._with_room(rollout_id, save_rollouts)
                # A copy of the metrics: with --async-save the step's end clears them before the
                # commit.
                step = Facts(
                    rollout_id=rollout_id,
                    ahead=ahead,
                    weight_version=self.pool.clock.version,
                    metrics={**self.log.pending},
                )
                if (old_actor := trainer.old_actor.facts(ahead)) is not None:
                    step["old_actor"] = old_actor
                self._open = temp, {**self.facts, **step}
            if not self.settings.async_save:
                self.commit()
            actor = trainer.actor
            if self.settings.save_hf and actor is not None:
                trainer.take_turn(actor)
                export = Path(self.settings.save_hf.format(rollout_id=rollout_id))
                self._with_room(rollout_id, lambda: actor.save_hf(export), export)

    @property
    def newest(self) -> int | None:
        """The rollout of the newest snapshot, also if it is still being written; None before the
        first.
        """
        return self.saved if self._open is None else int(self._open[1]["rollout_id"])

    def folder_of(self, rollout_id: int) -> Path:
        """The folder of a snapshot once it is complete."""
        assert self.folder is not None, "something was saved"
        return self.folder / snapshot.folder_name(rollout_id)

    def commit(self) -> None:
        """Wait until the open snapshot is written, and commit it; does nothing if none is open."""
        if self._open is None:
            return
        temp, facts = self._open
        rollout_id = facts["rollout_id"]
        written = list[FileEntry]()
        settings = self.settings
        # A signal must not leave a snapshot that is written but not committed.
        with self.stop.deferred():
            for group in self.trainer.groups:
                repeat = group.repeat_save if settings.async_save else None
                written += self._with_room(rollout_id, group.finish_save, repeat=repeat)
        self._with_room(rollout_id, lambda: snapshot.commit(temp, facts, written))
        self._open = None
        self.saved = rollout_id
        if settings.critic_save and self.trainer.critic is not None:
            target = Path(settings.critic_save)
            copy = partial(
                snapshot.copy_part, self.folder_of(rollout_id), "critic", target, facts, written
            )
            self._with_room(rollout_id, copy, target)
        REPORTS.tell(saved=True)  # From now on, a restart loads this run's own snapshot.
        # After the commit, so that there is a complete snapshot at any time.
        if settings.save_keep_last:
            snapshot.prune(temp.parent, settings.save_keep_last, settings.save_retain_interval)

    def _with_room(
        self,
        rollout_id: int,
        write: Callable[[], T],
        folder: Path | None = None,
        repeat: Callable[[], None] | None = None,
    ) -> T:
        """Call ``write``. If the disk is full, wait until there is room and call it again.

        Args:
            folder: Where it writes; the folder of the snapshots if it is None.
            repeat: Called before ``write`` is called again.

        Raises:
            StopRequested: The disk is full, and the user has asked to stop.
        """
        told = False
        while True:
            try:
                result = write()
            except Exception as error:
                if not is_full(error):
                    raise
                self._pause(rollout_id, folder or self.folder, error, told)
                told = True
                if repeat is not None:
                    repeat()
            else:
                if told:
                    self.log.note(f"there is room again: rollout {rollout_id} is being saved")
                return result

    def _pause(self, rollout_id: int, folder: Path | None, error: Exception, told: bool) -> None:
        """Wait until there may be more room."""
        assert folder is not None, "only a run with --save writes snapshots"
        newest = "there is no snapshot yet"
        if self.saved is not None:
            newest = f"the newest snapshot is of rollout {self.saved}"

        # signals are deferred while a snapshot is open, but this wait has no deadline
        def check() -> None:
            if self.stop.requested is not None:
                self.log.note(
                    f"rollout {rollout_id} is not saved: the disk of {folder} is full; {newest}"
                )
                raise StopRequested(self.stop.requested) from error

        check()
        if not told:
            self.log.note(
                f"the disk of {folder} is full: the run is paused until rollout {rollout_id} can "
                f"be saved. Free some space, or press Ctrl-C to end the run; {newest}"
            )
        wait_for_room(next(path for path in (folder, *folder.parents) if path.is_dir()), check)

    def commit_if_written(self) -> None:
        """Commit the open snapshot if all ranks have finished writing it."""
        if self._open is not None and not any(group.is_saving() for group in self.trainer.groups):
            self.commit()
