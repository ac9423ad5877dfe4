"""Open and close a run. A run ends normally, on a signal, with an error, or in order to restart
from a snapshot.

::

    with open_run(args) as run:
        ...

What follows a loss is decided by the plug-in :mod:`slime.plugins.restarts`.
"""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn, Protocol

from slime.cluster.actors import ActorError, ActorHandle, door
from slime.cluster.stop_signals import REPORTS, StopRequested
from slime.config.hooks import module_of_file
from slime.config.settings import redacted_text
from slime.observability.run_state import message_lines
from slime.registry import find

if TYPE_CHECKING:
    from slime.cluster.phases import Run
    from slime.cluster.start import Parts
    from slime.config.args import Args

ASK_SECONDS = 5.0
REPORT_SECONDS = 15.0
SHUTDOWN_SECONDS = 60.0
_FRAME = re.compile(r'^ +(File "[^"]+", line \d+, in \S+)', re.MULTILINE)


@contextlib.contextmanager
def open_run(args: Args, asynchronous: bool = False, in_program: bool = False) -> Iterator[Run]:
    """Start engines and trainer, and shut them down at the end, after an error, or when the user
    stops the run.

    Args:
        asynchronous: Whether rollouts are generated while an earlier one trains
            (``train_async.py``).
        in_program: Whether the run belongs to a program of the user's, see :class:`StopSignals`.

    Raises:
        SystemExit: 130 or 143 after Ctrl-C or SIGTERM.
        KeyboardInterrupt: After Ctrl-C, with ``in_program``.
    """
    # Imported here, so that --help and a refused command line need neither numpy nor an HTTP
    # client.
    from slime.cluster.start import prepare, start

    parts = prepare(args, asynchronous, in_program)
    with RunEnd(parts):
        yield start(parts)


def run_loop(args: Args, loop: Callable[[Args, Run], None], asynchronous: bool = False) -> None:
    """Open a run, call ``loop(args, run)``, and shut the run down at the end.

    If training ranks are lost, they are replaced if possible, and the loop is called again with a
    run that begins after the last snapshot. Every other error ends the run as
    :class:`RunEnd` describes.

    Args:
        asynchronous: Whether rollouts are generated while an earlier one trains
            (``train_async.py``).

    Raises:
        SystemExit: 130 or 143 after Ctrl-C or SIGTERM; 1 if a folder cannot be used.
    """
    from slime.cluster.folders import FolderInUse
    from slime.cluster.start import prepare, start
    from slime.observability.run_dir import RunDirError

    try:
        parts = prepare(args, asynchronous)
    except (FolderInUse, RunDirError) as error:  # the user's to mend: no traceback
        sys.exit(f"the run did not start: {error}")
    with RunEnd(parts) as end:
        run = start(parts)
        while True:
            try:
                loop(args, run)
                return
            except Exception as error:
                following = end.recovery.replace(error)
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
    for file in places:
        if file.is_file():
            return module_of_file(f"slime_loop_{file.stem}", file)
    raise FileNotFoundError(
        f"{name} is missing, neither {places[0]} nor {places[1]} exists: install slime again"
    )


class NothingTrained(RuntimeError):
    """The run is complete, but every sample of every rollout failed."""


class Recovery(Protocol):
    """What follows a loss; see :mod:`slime.plugins.restarts`."""

    def begin(self) -> None:
        """Note that the run begins: from now on, an end of this process without a report is a
        loss.
        """

    def replace(self, error: Exception) -> Run | None:
        """Replace lost training ranks while the engines stay; return the run that goes on, or None
        if it cannot.
        """

    def restarts(self, error: Exception) -> bool:
        """Return whether the driver is started again from the last snapshot, and print why."""

    def leave(self) -> NoReturn:
        """End this process, so that the next driver starts."""


Outcome = Literal["completed", "stopped", "restarting", "failed"]


class RunEnd:
    """Context manager around the start and the loop of a run. Its exit does the following, in this
    order:

    1. If nothing failed, complete the run: commit the last snapshot, close the ledger, print the
       summary.
    2. After Ctrl-C or SIGTERM, save a snapshot if a step was trained since the last one.
    3. End all processes of the run.
    4. After an error that a restart can repair (a lost process), let the supervisor start the
       driver again.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.recovery: Recovery = find("recovery", "restarts")(parts)

    def __enter__(self) -> RunEnd:
        self.parts.stop.__enter__()
        self.recovery.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        parts = self.parts
        outcome: Outcome = "failed"
        # of the end; another error than that of the block if completing or saving the run failed
        cause = error
        try:
            outcome, cause = self._complete_or_save(error)
        except BaseException as interruption:  # such as a second Ctrl-C in a program
            cause = interruption
        state = parts.log.display.state
        if state is not None:  # slime doctor reads it
            state.end(outcome, cause if outcome in ("restarting", "failed") else None)
        self._end_processes(outcome)
        # The ways out. Python raises the error of the block again by itself, but not one that arose
        # in this method.
        if outcome == "restarting":
            self.recovery.leave()
        if outcome == "stopped" and parts.stop.in_program:
            raise KeyboardInterrupt from None
        if outcome == "stopped":
            sys.exit(130 if str(cause) == "SIGINT" else 143)
        # who debugs or programs needs the whole error
        if cause is not None and not (parts.args.inline or parts.stop.in_program):
            self._tell_briefly(cause)
        if cause is not None and cause is not error:
            raise cause

    def _complete_or_save(
        self, error: BaseException | None
    ) -> tuple[Outcome, BaseException | None]:
        """Do what is left to do for the run; returns how it ends, and the error that ends it."""
        if error is None and self.parts.run is not None:
            try:
                complete(self.parts.run)
            except Exception as failure:  # A rank may die while it writes the last snapshot.
                error = failure
        if error is None:
            return "completed", None
        if isinstance(error, StopRequested):
            # Before the snapshot: if this process is killed during it, the supervisor must not
            # restart the run.
            REPORTS.tell(over=True)
            try:
                snapshot_before_stop(self.parts)
            except Exception as failure:  # The step is lost, which is not a stop in order.
                return "failed", failure
            return "stopped", error
        if isinstance(error, Exception) and self.recovery.restarts(error):
            return "restarting", error
        return "failed", error

    def _end_processes(self, outcome: Outcome) -> None:
        # Before the shutdown: Ray may end this process during it, and then nobody could tell the
        # supervisor.
        end = "lost" if outcome == "restarting" else "over"
        REPORTS.tell(**{end: True}, in_shutdown=True, complete=outcome == "completed")
        try:
            shut_down(self.parts, failed=outcome in ("restarting", "failed"))
        finally:
            for lock in self.parts.locks:
                lock.release()
        REPORTS.tell(in_shutdown=False)
        self.parts.stop.__exit__(None, None, None)

    def _tell_briefly(self, error: BaseException) -> None:
        """Write the traceback to ``logs/driver.log``, and let Python print only where it is and,
        last, the message.
        """
        text = redacted_text("".join(traceback.format_exception(error)))
        folder = self.parts.dir.path
        self.parts.log.display.record(f"the run failed\n{text}")
        own = [
            frame
            for frame in _FRAME.findall(text)
            if "-packages/" not in frame and "/lib/python3" not in frame
        ]
        lines = [
            f"the run failed; the traceback is in {folder}/logs/driver.log (slime doctor {folder} "
            "says more)",
            *own[-1:],
            *(message_lines(text) or [redacted_text(f"{type(error).__name__}: {error}")]),
        ]

        def tell(
            kind: type[BaseException], raised: BaseException, trace: TracebackType | None
        ) -> None:
            if raised is error:
                print(*lines, sep="\n", file=sys.stderr)
            else:
                sys.__excepthook__(kind, raised, trace)

        sys.excepthook = tell


def complete(run: Run) -> None:
    """Commit the last snapshot, close the ledger and print the summary; does nothing the second
    time.

    Raises:
        LedgerError: A requested group is missing, or was counted more than once.
        NothingTrained: No rollout had a sample that could be trained.
    """
    from slime.cluster.rollout_manager import RolloutManager

    if run.completed:
        return
    run.completed = True
    run.snapshots.commit()
    counts = run.manager.call(
        "the ledger to be closed",
        RolloutManager.close_account,
        -1 if run.trainer.trained is None else run.trainer.trained,
    )
    listed = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    run.log.note(f"ledger: {sum(counts.values())} groups asked for: {listed or 'none'}")
    run.log.display.finish()
    failed = run.log.all_failed
    if failed and all(failed):
        raise NothingTrained(
            f"nothing was trained: in all {len(failed)} rollouts, every sample failed or had no "
            "token to train. A warning of each rollout names its first error, and the folder "
            "samples has the samples"
        )


def snapshot_before_stop(parts: Parts) -> None:
    """Save what was trained since the last snapshot, so that ``--load`` continues exactly here."""
    parts.log.note(f"{parts.stop.requested}: shutting down gracefully (press again to kill)")
    # The waits below must not be interrupted by the request that led here.
    parts.stop.is_deferred = True
    run = parts.run
    if run is None:
        return
    # On a full disk, which raises this, nobody waits for room while the run ends.
    with contextlib.suppress(StopRequested):
        save_while_generating(run)


def save_while_generating(run: Run) -> None:
    """Save what was trained since the last snapshot, if the run has a folder for it; the engines
    may end for this.
    """
    snapshots = run.snapshots
    snapshots.commit()  # A snapshot of --async-save may still be open.
    trained = run.trainer.trained
    if snapshots.folder is None or trained is None or trained == snapshots.saved:
        return
    # In a colocated run, the trainer sleeps while the engines generate: it needs their memory in
    # order to save.
    run.pool.end_for_save()
    snapshots.save(trained)
    snapshots.commit()
    run.log.note(f"saved rollout {trained}; go on with --load {snapshots.folder}")


def shut_down(parts: Parts, failed: bool) -> None:
    """End all processes of the run; after a failure, first print which engines were alive.

    Errors of actors that are dead already are suppressed, so that the steps after them still run.
    """
    from slime.cluster.engine_fleet import EngineFleet
    from slime.weights.transports.shared_memory import sweep_shared_memory

    if not door().connected:
        return
    note = parts.log.note
    # The rollout manager with its engines, which would go on to generate.
    if parts.manager is not None:
        manager = parts.manager.handle
        if failed and not answers(manager):
            with contextlib.suppress(ActorError):
                door().kill(manager)  # It is frozen or gone. Its engines end with it.
        else:
            if failed and parts.urls:
                with contextlib.suppress(Exception):
                    report = manager.on_engines.remote(EngineFleet.report)
                    note(door().get([report], REPORT_SECONDS)[0])
            with contextlib.suppress(Exception):
                parts.log.warn(door().get([manager.shutdown.remote()], SHUTDOWN_SECONDS)[0])
    # What the training ranks hold beyond their processes: shared memory, and process groups with
    # engines.
    for group in parts.groups:
        with contextlib.suppress(Exception):
            group.close()
    # The last lines that the user sees, then the cluster with all processes that are left.
    if failed:
        note(f"logs of all processes: {parts.dir.logs}")
    parts.log.close(failed)
    if parts.placement is not None:
        # After a failure, the cluster itself may be gone; its error must not hide the one that
        # ended the run.
        try:
            parts.placement.group.remove()
        except (RuntimeError, OSError):
            if not failed:
                raise
    door().disconnect()
    # Last, since files of living processes are kept. Ray kills its workers before torch's own
    # cleanup has run in them.
    sweep_shared_memory()


def answers(actor: ActorHandle) -> bool:
    """Whether an actor answers ``status()`` within :data:`ASK_SECONDS`."""
    try:
        door().get([actor.status.remote()], ASK_SECONDS)
    except Exception:
        return False
    return True
