"""How a run ends: well, by a signal, with an error, or in order to be restarted from its last snapshot."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from slime.cluster.restart import answers, exit_for_restart, lost_parts, report_loss
from slime.cluster.stop_signals import StopRequested
from slime.cluster.supervisor import REPORTS

if TYPE_CHECKING:
    from slime.cluster.parts import Parts
    from slime.cluster.phases import Run
    from slime.config.args import Args

REPORT_SECONDS = 15.0
SHUTDOWN_SECONDS = 60.0


class RunEnd:
    """Context manager around the start and the loop of a run. Its exit

    1. completes the run if nothing failed: commits the last snapshot, closes the ledger, prints the summary;
    2. after Ctrl-C or SIGTERM saves a snapshot, if something was trained since the last one;
    3. leaves no process behind;
    4. after an error that a restart can mend (a lost process) lets the supervisor start the driver again.
    """

    def __init__(self, args: Args, parts: Parts) -> None:
        self.parts, self.max_restarts = parts, args.max_restarts or 0
        self._facts = {
            "max_restarts": args.max_restarts,
            "save": args.save,
            "run_name": args.run_name,
            "output_dir": args.output_dir,
        }

    def __enter__(self) -> None:
        self.parts.stop.__enter__()
        REPORTS.began(self._facts)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        late: Exception | None = None
        restarts = stopped = False
        try:
            if error is None and self.parts.run is not None:
                try:
                    complete(self.parts.run)
                except Exception as failure:  # a rank may die while it writes the last snapshot
                    error = late = failure
            stopped = isinstance(error, StopRequested)
            if isinstance(error, Exception) and not stopped:
                restarts = self._restarts_after(error)
            if stopped:
                REPORTS.over()
                snapshot_before_stop(self.parts)
        finally:
            # Before the shutdown: Ray may end this process in it, and the supervisor must know by then.
            (REPORTS.lost if restarts else REPORTS.over)()
            shut_down(self.parts, failed=error is not None and not stopped)
            self.parts.stop.__exit__(None, None, None)
        if restarts:
            exit_for_restart()
        if stopped:
            sys.exit(130 if str(error) == "SIGINT" else 143)
        if late is not None:
            raise late

    def _restarts_after(self, error: Exception) -> bool:
        """Whether the run can continue from its last snapshot; if so, prints the error and what was lost."""
        if not self.max_restarts or not REPORTS.attached:
            return False
        lost = lost_parts(self.parts.actors(), error)
        if not lost:
            return False
        saved = self.parts.run.snapshots.saved if self.parts.run is not None else None
        report_loss(lost, error, saved, self.max_restarts - 1, self.parts.log.note)
        return True


def complete(run: Run) -> None:
    """Commit the last snapshot, close the ledger and print the summary.

    Raises:
        LedgerError: a group that was requested is in no place, or in several.
    """
    run.snapshots.commit()
    last = -1 if run.trainer.trained is None else run.trainer.trained
    counts = run.manager.wait(run.manager.handle.close_account.remote(last), "the ledger to be closed")
    listed = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    run.log.note(f"ledger: {sum(counts.values())} groups asked for: {listed or 'none'}")
    run.log.display.finish()


def snapshot_before_stop(parts: Parts) -> None:
    """Save what was trained since the last snapshot, so that ``--load`` continues exactly here."""
    parts.log.note(f"{parts.stop.requested}: shutting down gracefully (press again to kill)")
    parts.stop.ending = True
    run = parts.run
    if run is None:
        return
    run.snapshots.commit()
    folder, trained = run.snapshots.settings.folder, run.trainer.trained
    if folder is None or trained is None or trained == run.snapshots.saved:
        return
    run.pool.end_for_save()
    run.snapshots.save(trained)
    run.snapshots.commit()
    run.log.note(f"saved rollout {trained}; go on with --load {folder}")


def shut_down(parts: Parts, failed: bool) -> None:
    """Leave no process behind; after a failure first print which engines were alive."""
    import ray

    from slime.cluster.leftovers import sweep_leftovers
    from slime.cluster.session import disconnect
    from slime.weights.transports.shared_memory import sweep_shared_memory

    if not ray.is_initialized():
        return
    note = parts.log.note
    if parts.manager is not None:
        manager = parts.manager.handle
        if failed and not answers(manager):
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(manager)  # type: ignore[arg-type]  # frozen or gone; its engines end with it
        else:
            if failed and parts.engines_started:
                with contextlib.suppress(ray.exceptions.RayError):
                    note(ray.get(manager.engine_report.remote(), timeout=REPORT_SECONDS))
            with contextlib.suppress(ray.exceptions.RayError):
                for warning in ray.get(manager.shutdown.remote(), timeout=SHUTDOWN_SECONDS):
                    note(f"warning: {warning}")
    for group in parts.groups:
        with contextlib.suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            group.close()
    if failed:
        note(f"logs of all processes: {parts.dir.path / 'logs'}")
    parts.log.close()
    if parts.placement is not None:
        with contextlib.suppress(*((ray.exceptions.RayError, RuntimeError, OSError) if failed else ())):
            parts.placement.remove()
    disconnect()
    sweep_shared_memory()  # Ray kills its workers before torch's own cleanup has run in them.
    sweep_leftovers()
