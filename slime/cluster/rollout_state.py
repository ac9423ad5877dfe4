"""The part of a snapshot that concerns generation: the data source, the ledger, and rollouts
generated ahead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.checkpoint.ledger import Ledger, Line
from slime.config.rollout import OWN_FUNCTIONS
from slime.data.plain_values import read_state, state_file, write_state
from slime.data.sample import Group, Sample, groups_from_dicts, groups_to_dicts
from slime.data.source import (
    DataSource,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    has_files,
    is_stateful,
)
from slime.observability.files import warn
from slime.observability.run_dir import RunDir
from slime.registry import called_for
from slime.rollout.group import with_copies
from slime.rollout.weight_timeline import Recording, WeightTimeline, settings_to_compare

if TYPE_CHECKING:
    from slime.config.args import Args

BUILT_IN_SOURCES = RolloutDataSource, RolloutDataSourceWithBuffer


@dataclass
class Rollout:
    """A generated rollout that no step has trained yet."""

    groups: list[Group]
    metrics: dict[str, float]
    seconds: float


class RolloutState:
    """The state of one rollout manager that snapshots hold.

    A snapshot after step ``N`` holds the data source as it was after the newest complete rollout
    ``M``, and the samples of rollouts ``N + 1`` to ``M``: a resumed run trains these instead of
    generating them again. A user's data source with ``load`` and ``save`` methods of its own can
    only go back to ``N`` itself, so in that case these rollouts are generated again.
    """

    def __init__(
        self, args: Args, run_dir: Path, source: DataSource, in_program: bool = False
    ) -> None:
        self.args = args
        self.source = source
        self.listeners = called_for("group listener", args)
        # Only where built-in code alone takes groups from the data source and puts them back, the
        # ledger can account for every group.
        from_elsewhere = (
            args.rollout_all_samples_process_path
            or args.rollout_sample_filter_path
            or args.buffer_filter_path
            or args.load_debug_rollout_data
            or args.rollout_function_path not in OWN_FUNCTIONS
        )
        self.ledger = Ledger(
            RunDir(run_dir).ledger,
            strict=type(source) in BUILT_IN_SOURCES and not from_elsewhere,
            keeps=getattr(type(source), "add_samples", None) is not RolloutDataSource.add_samples,
        )
        if isinstance(source, RolloutDataSourceWithBuffer):
            source.on_dropped = self.ledger.discarded
        asked = bool(args.save_interval or args.save)
        self.saves = asked or in_program  # a program may save at any time
        if asked and not is_stateful(source) and not has_files(source):
            warn(
                "a resumed run will begin with its first prompts again: the data source "
                f"{type(source).__name__} has neither state_dict and load_state_dict nor save and "
                "load"
            )
        # by rollout: the state of the data source and the length of the schedule's file after it,
        # until it is trained
        self.after: dict[int, tuple[object, int | None]] = {}
        self.ahead: dict[int, Rollout] = {}  # complete rollouts that are not trained yet
        self.newest = -1  # the newest complete rollout
        self.begun = -1  # the newest rollout for which the data source was asked
        # the groups of ``begun`` that are accepted so far, for --train-during-rollout
        self._finished: list[Group] = []
        # from the snapshot: used instead of generating these rollouts
        self.restored: dict[int, Rollout] = {}
        self.schedule: WeightTimeline | None = None  # of an asynchronous run
        self.attempt = 0
        # the length of the schedule's file in the snapshot from which the run resumes
        self._position: int | None = None
        # the newest rollout for which ``save`` of the user's data source was called
        self.own_saved = -1

    def open_schedule(self, path: Path, step: int, first: int, last: int) -> WeightTimeline:
        """Open the log of the schedule of rollouts ``first`` to ``last - 1``, and the one of
        ``--replay-schedule``.

        Args:
            step: The number of steps that have trained the engines' weights.
        """
        replayed = self.args.replay_schedule
        settings = settings_to_compare(self.args)
        recording = Recording(Path(replayed), settings) if replayed else None
        if recording is not None:
            first_new = first + len(self.restored)
            if first_new < last and (
                warning := recording.check_covers(first_new, last, self.args.rollout_batch_size)
            ):
                warn(warning)
        self.schedule = WeightTimeline(path, settings, recording, self.attempt, self._position)
        self.schedule.step = step
        return self.schedule

    def begin(self, rollout_id: int) -> None:
        """Note that the data source is asked for a rollout."""
        self._finished = []
        self.begun = rollout_id

    def finished_groups(self, rollout_id: int) -> list[Group]:
        """The groups of a rollout that are accepted so far, in the order in which they were; none
        of one that was generated before this process.
        """
        return self._finished if rollout_id == self.begun else []

    def observe(self, event: str, group: Group, facts: Mapping[str, object]) -> None:
        """Record an event of a group, which the rollout loops report."""
        self.ledger(event, group, facts)
        if event == "accepted" and self.args.train_during_rollout > 1:
            self._finished.append(group)
        for listen in self.listeners:
            listen(self.args, self.source, event, group)
        if self.schedule is not None:
            self.schedule(event, group, facts)

    def complete(self, rollout_id: int, rollout: Rollout) -> None:
        """Record a complete rollout, and keep what a snapshot after it needs.

        It is called on the event loop of the pool, so the pool cannot change while its state is
        copied.
        """
        args = self.args
        open_groups = getattr(self.source, "open_groups", None)
        self.ledger.complete(
            rollout_id,
            rollout.groups,
            open_groups() if open_groups else None,
            self.source.sample_group_index if isinstance(self.source, RolloutDataSource) else None,
        )
        self.newest = max(self.newest, rollout_id)
        # No step ends that would remove the state of older rollouts.
        if args.debug_rollout_only:
            self.ledger.cuts = {rollout_id: self.ledger.cuts[rollout_id]}
            self.after.clear()
        if not self.saves:
            return
        position = self.schedule.file.position() if self.schedule is not None else None
        self.after[rollout_id] = self._source_state(), position
        if not args.debug_rollout_only:
            self.ahead[rollout_id] = _copied(rollout)
        if args.save_interval and (rollout_id + 1) % args.save_interval == 0:
            # Now, because when the snapshot is written, a later rollout may have advanced the data
            # source.
            self._save_own(rollout_id)

    def _source_state(self) -> object:
        """The state of the data source as it is now; None if it has none."""
        if not is_stateful(self.source):
            return None
        state = self.source.state_dict()
        # A user's state may be made of the lists that the source goes on to change. Those of the
        # built-in sources are copies, and large: they hold the groups in the buffer.
        return state if type(self.source) in BUILT_IN_SOURCES else copy.deepcopy(state)

    def trained(self, rollout_id: int) -> None:
        """Record that all rollouts up to this one have trained, and drop what no later snapshot
        needs.
        """
        self.ledger.trained(rollout_id)
        self.ahead = {r: rollout for r, rollout in self.ahead.items() if r > rollout_id}
        # ``>=``: the next snapshot may be one after this very step, with no rollout complete after
        # it.
        self.after = {r: kept for r, kept in self.after.items() if r >= rollout_id}

    def close_account(self, trained: int) -> Line:
        """Check the ledger after step ``trained`` and write its closing line; see
        :meth:`Ledger.cut`.
        """
        return self.ledger.cut(trained, self._base(trained))

    def _base(self, trained: int) -> int:
        """The rollout whose data source state belongs to a snapshot after step ``trained``."""
        return trained if self._own("load") is not None else max(self.newest, trained)

    def save(self, rollout_id: int, directory: Path) -> int:
        """Write this process's part of the snapshot after step ``rollout_id`` below ``directory``,
        and return the number of rollouts that it holds."""
        # The snapshot refers to a position in the schedule's file, so the file must be on disk up
        # to there.
        if self.schedule is not None:
            self.schedule.file.sync()
        base = self._base(rollout_id)
        source, position = self.after.get(base, (None, None))
        kept = {r: rollout for r, rollout in self.ahead.items() if rollout_id < r <= base}
        write_state(
            state_file(directory, rollout_id),
            {
                "rollout_id": rollout_id,
                "data_source": source,
                "ahead": {
                    r: {**vars(one), "groups": groups_to_dicts(one.groups)}
                    for r, one in kept.items()
                },
                "ledger": self.close_account(rollout_id),
                "schedule": position,
            },
        )
        if (
            self._own("save") is not None
            and rollout_id > self.own_saved
            and self.begun > rollout_id
        ):
            name = type(self.source).__name__
            warn(
                f"{name}.save was called late, for a snapshot between two of --save-interval: a "
                f"run that resumes from it skips what {name} had given for rollout "
                f"{rollout_id + 1}; state_dict has no such gap"
            )
        self._save_own(rollout_id)
        self.trained(rollout_id)
        return len(kept)

    def close(self) -> None:
        self.ledger.close()
        if self.schedule is not None:
            self.schedule.file.close()

    def load(self, rollout_id: int, directory: Path, attempt: int) -> None:
        """Restore the state from the snapshot after step ``rollout_id``."""
        state = read_state(state_file(directory, rollout_id))
        if state["data_source"] is not None:
            assert is_stateful(self.source), "--data-source-path is not the class that was saved"
            self.source.load_state_dict(copy.deepcopy(state["data_source"]))
        elif is_stateful(self.source):
            warn(
                f"the snapshot {directory} holds no state of the data source: it begins with its "
                "first prompts again"
            )
        if load := self._own("load"):
            load(rollout_id)
        self.ledger.restore(state["ledger"], attempt)
        self.attempt = attempt
        self._position = state["schedule"]
        for number, kept in state["ahead"].items():
            self.ahead[number] = Rollout(**{**kept, "groups": groups_from_dicts(kept["groups"])})
        self.restored = {number: _copied(rollout) for number, rollout in self.ahead.items()}
        # The restored data source is in the state after the newest of these rollouts, not after
        # ``rollout_id``.
        self.newest = max(self.ahead, default=rollout_id)
        self.after = {self.newest: (state["data_source"], self._position)}

    def _save_own(self, rollout_id: int) -> None:
        """Call ``save`` of the user's data source, once for each rollout after which a snapshot is
        written.
        """
        save = self._own("save")
        if save is not None and rollout_id > self.own_saved:
            self.own_saved = rollout_id
            save(rollout_id)

    def _own(self, name: str) -> Callable[[int], None] | None:
        """The method ``name`` of the user's data source, or None if it has none or only the
        built-in one.
        """
        # of the object: a wrapper may pass its methods on
        function = getattr(self.source, name, None)
        built_in = getattr(RolloutDataSource, name)
        if callable(function) and getattr(function, "__func__", None) is not built_in:
            return function
        return None


def _copied(rollout: Rollout) -> Rollout:
    """Copy a rollout for the next snapshot, because user hooks that convert the samples for
    training may modify them.

    The entries of metadata and rewards are shared: users may put objects there that cannot be
    copied.
    """
    groups = [with_copies(group, _copied_sample) for group in rollout.groups]
    return Rollout(groups, dict(rollout.metrics), rollout.seconds)


def _copied_sample(sample: Sample) -> Sample:
    copied = copy.copy(sample)
    for name in ("metadata", "train_metadata", "reward"):
        setattr(copied, name, copy.copy(getattr(sample, name)))
    return copied
