"""A whole run as the driver sees it: start, the phases of one iteration, snapshot, end in order."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from slime.backends.lr_schedule import zero_lr_warning
from slime.cluster.checks import check_schedules
from slime.cluster.faults import Faults
from slime.cluster.restart import answers, end_lost, goes_on
from slime.cluster.supervisor import REPORTS
from slime.cluster.waiting import StopRequested, StopSignals, Waiter
from slime.config.errors import ConfigError
from slime.observability.trace_file import add_phases, trace_of
from slime.weights.audit import gap_alarm

if TYPE_CHECKING:
    from slime.config.args import Args

KEPT_PHASES = 500
START_MARGIN_SECONDS = 180.0  # beyond --start-timeout, so that the one who waits for the process itself reports first


class Run:
    """Context manager around one training run.

    The loops in ``train.py`` and ``train_async.py`` call one method per phase; each shows itself,
    has the deadline ``--phase-timeout`` and adds its seconds to the metrics of the step.
    """

    def __init__(self, args: Args, asynchronous: bool = False) -> None:
        """``asynchronous``: rollouts are made while the one before trains (``train_async.py``)."""
        from slime.observability.display import Display
        from slime.observability.run_dir import RunDir

        self.args = args
        self.asynchronous = asynchronous
        self.snapshot = self._find_snapshot()
        self.resumes = self.snapshot is not None and not args.finetune
        self.dir = RunDir.create(args, resume=self.resumes)
        self.display = Display(args, self.dir)
        self.stop = StopSignals()
        self.waiter = Waiter(self.stop, self._show, args.status_timeout or None)
        self.metrics_log: Any = None
        self.pending: dict[str, float] = {}  # metrics of the step under way
        self.manager: Any = None
        self.placement: Any = None
        self.actor: Any = None
        self.critic: Any = None
        self.engine_urls: list[str] = []
        self.faults = Faults(self)
        self.first_rollout = 0
        self.num_rollout = 0
        self.attempt = 0
        self._checked_equal = False
        self._told_of_zero_lr = False
        self._old_actor_version = ""  # the version after which the old actor was refreshed
        self.version = ""  # of the weights that the engines hold: <attempt>.<steps that had trained them>
        self.held_step = 0  # the second part of it
        self.updated_after: int | None = None  # what ``trained`` was when they got them
        self.trained: int | None = None  # last rollout whose training is complete
        self.saved: int | None = None
        self._open_snapshot: tuple[Path, dict[str, Any]] | None = None
        self._progress: Any = None
        self._phases: list[dict[str, Any]] = []  # the newest, for the traces
        self._step_started = time.perf_counter()

    # --- start and end -----------------------------------------------------------------------

    def __enter__(self) -> Run:
        self.stop.__enter__()
        REPORTS.began({name: getattr(self.args, name) for name in ("max_restarts", "save", "run_name", "output_dir")})
        try:
            self._start()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def _start(self) -> None:
        import ray

        from slime.cluster.placement import Placement
        from slime.cluster.rollout_manager import RolloutManager
        from slime.cluster.session import connect
        from slime.config.layout import ParallelLayout

        with self.phase("start"):
            connect(self.args)
            self.stop.install()
            self.placement = Placement(self.args)
            self.args.threads_per_process = self.args.threads_per_process or self._threads()
            slots = self.placement.slots
            self.manager = (
                ray.remote(RolloutManager)
                .options(num_cpus=0, max_concurrency=8)
                .remote(
                    self.args,
                    str(self.dir.path),
                    ParallelLayout.from_args(self.args) if slots.train else ParallelLayout(),
                )
            )
            starting = None if self.args.debug_train_only else self.manager.start_engines.remote(self.placement)
            in_turn = self.args.offload_rollout and self.placement.on_gpu and starting is not None
            if in_turn:  # an engine takes its share of the memory that it finds free
                self._engines_started(starting, release=slots.train > 0)
            self.num_rollout = self._resolve_num_rollout()  # the trainers' schedules depend on it
            if slots.train:
                self._start_training()
            self._try_save_folder()
            if starting is not None and not in_turn:
                self._engines_started(starting, release=self.args.offload_rollout and slots.train > 0)
            for group in self.groups:
                group.wait_started()
            self._restore()
            self._open_metrics()
        self.display.pop_times()  # a step's own times begin with the step
        self._step_started = time.perf_counter()

    def _engines_started(self, starting: Any, release: bool) -> None:
        self.engine_urls = self.manager_call(
            [starting], "the engines to start", self.args.start_timeout + START_MARGIN_SECONDS
        )
        if release and self.engine_urls:
            self.manager_call([self.manager.offload.remote()], "the engines to release memory")

    def _threads(self) -> int:
        """CPU threads per process: phases of a synchronous run take turns, so each may use all cores."""
        import os

        slots = self.placement.slots
        return max((os.cpu_count() or 1) // max(slots.train, slots.rollout, 1), 1)

    def _start_training(self) -> None:
        from slime.cluster.train_group import TrainGroup

        if problems := check_schedules(self.args):  # the run's length may have been unknown until now
            raise ConfigError(problems)
        make = lambda role: TrainGroup(  # noqa: E731 - two calls that differ in one word
            self.args, role, self.placement, self.waiter, self.dir.path / "logs",
            self.snapshot.path / role if self.snapshot else None,
        )  # fmt: skip
        self.actor = make("actor")
        self.critic = make("critic") if self.args.use_critic else None

    def _try_save_folder(self) -> None:
        """Every process that writes snapshots reaches the folder that the driver commits them in; found before the
        models are loaded."""
        from slime.checkpoint.shared_folder import FolderTrial

        if not self.args.save:
            return
        with FolderTrial(Path(self.args.save)) as trial:
            where = str(trial.folder), trial.token
            answers = {"rollout manager": self.manager_call([self.manager.try_folder.remote(*where)], "to look")}
            for group in self.groups:
                answers |= group.try_folder(*where)
            trial.check(answers)

    @property
    def groups(self) -> list[Any]:
        return [group for group in (self.actor, self.critic) if group is not None]

    def _find_snapshot(self) -> Any:
        """The snapshot to go on from (with ``--finetune``: to take the weights of), or None for a fresh start."""
        from slime.checkpoint.snapshot import latest

        return latest(Path(self.args.load), self.args.ckpt_step) if self.args.load else None

    def _settings(self) -> dict[str, Any]:
        """What shapes the run; not what is shown or kept of it."""
        from slime.checkpoint.manifest import settings
        from slime.config.args import FLAGS
        from slime.config.args_dump import to_dict

        shown = {name for name, flag in FLAGS.items() if flag.group in ("observability", "debugging and profiling")}
        return settings({name: value for name, value in to_dict(self.args).items() if name not in shown})

    def _restore(self) -> None:
        from slime.checkpoint import manifest as manifest_of

        if self.resumes:
            manifest = self.snapshot.manifest
            self.trained = self.saved = int(manifest["rollout_id"])
            self.attempt = int(manifest["attempt"]) + 1
            state = self.manager.load_state.remote(self.trained, str(self.snapshot.path), self.attempt)
            self.manager_call([state], "the data source to be restored")
            self.first_rollout = self.trained + 1
            self.display.note(f"resumed from {self.snapshot.path}: going on with rollout {self.first_rollout}")
            changed = manifest_of.changes(manifest.get("settings", {}), self._settings())
            manifest_of.check_same_prompts(manifest.get("settings", {}), self._settings())
            if changed:
                self.display.note("warning: settings that differ from the saved run's: " + "; ".join(changed))
        if self.args.start_rollout_id is not None:
            self.first_rollout = self.args.start_rollout_id

    def _open_metrics(self) -> None:
        """On a resume: without the rows of steps that are made again, with that of the step that was saved."""
        from slime.observability.metrics import MetricsLogger, read_metrics

        self.metrics_log = MetricsLogger(self.args, self.dir, self.first_rollout if self.resumes else None)
        if not self.resumes or not self.dir.metrics.exists():
            return
        logged = [row["rollout/step"] for row in read_metrics(self.dir.metrics) if "rollout/step" in row]
        if self.trained not in logged:  # killed between the snapshot and the end of the step
            self.metrics_log.log(self.snapshot.manifest["metrics"], self.trained, "rollout/step")

    def _resolve_num_rollout(self) -> int:
        """``--num-rollout``, or the length of ``--num-epoch`` epochs; ``args.num_rollout`` is set from here on."""
        if self.args.num_rollout is not None:
            return int(self.args.num_rollout)
        per_epoch = self.manager_call([self.manager.num_rollout_per_epoch.remote()], "the data source")
        self.args.num_rollout = int(per_epoch * (self.args.num_epoch or 1))
        return self.args.num_rollout

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = isinstance(error, StopRequested)
        again = False
        try:
            again = isinstance(error, Exception) and not stopped and goes_on(self, error)
            if stopped:
                REPORTS.over()
                self._snapshot_before_stop()
            if kind is None:
                self.finish_save()
                self._close_account()
                self.display.finish()
        finally:
            (REPORTS.lost if again else REPORTS.over)()  # before the shutdown, which may end this process
            self._shutdown(failed=kind is not None and not stopped)
            self.stop.__exit__(None, None, None)
        if again:
            end_lost()
        if stopped:
            sys.exit(130 if str(error) == "SIGINT" else 143)

    def _snapshot_before_stop(self) -> None:
        self.display.note(f"{self.stop.requested}: ending in order (once more ends at once)")
        self.stop.ending = True
        self.finish_save()
        if self.args.save and self.trained is not None and self.trained != self.saved:
            self.save(self.trained)
            self.display.note(f"saved rollout {self.trained}; go on with --load {self.args.save}")

    def _close_account(self) -> None:
        """Each group that was asked for is in one place, or the run ends with an error that says which is not."""
        last = -1 if self.trained is None else self.trained
        counts = self.manager_call([self.manager.close_account.remote(last)], "the ledger to be closed")
        told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        self.display.note(f"ledger: {sum(counts.values())} groups asked for: {told or 'none'}")

    def _shutdown(self, failed: bool) -> None:
        """Leave no process behind; on a failure say first which engines were alive."""
        import ray

        from slime.cluster.leftovers import sweep_leftovers
        from slime.cluster.session import disconnect
        from slime.weights.transports.shared_memory import sweep_shared_memory

        if not ray.is_initialized():
            return
        if self.manager is not None and failed and not answers(self.manager):
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self.manager)  # it is frozen or gone; its engines end with it
        elif self.manager is not None:
            if failed and self.engine_urls:
                with contextlib.suppress(ray.exceptions.RayError):
                    self.display.note(ray.get(self.manager.engine_report.remote(), timeout=15))
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(self.manager.shutdown.remote(), timeout=60)
        for group in self.groups:
            with contextlib.suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                group.close()
        if failed:
            self.display.note(f"logs of all processes: {self.dir.path / 'logs'}")
        if self.metrics_log is not None:
            self.metrics_log.close()
        self.display.close()
        if self.placement is not None:
            with contextlib.suppress(*((ray.exceptions.RayError, RuntimeError, OSError) if failed else ())):
                self.placement.remove()
        disconnect()
        sweep_shared_memory()  # Ray kills workers before torch's own cleaner has run
        sweep_leftovers()

    # --- phases ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show a phase while it runs and time it."""
        outer = self._progress
        with self.display.phase(name) as self._progress:
            try:
                yield
            finally:
                self._progress = outer

    def _show(self, status: dict[str, Any]) -> None:
        if self._progress is not None:
            self._progress.update(status)

    def manager_call(
        self, refs: list[Any], what: str, deadline: float | None = None, meanwhile: Callable[[], None] | None = None
    ) -> Any:
        """Wait for one answer of the rollout manager."""
        named = {"rollout manager": self.manager}
        limit = deadline or self.args.phase_timeout
        return self.waiter.get(refs, what, limit, actors=named, meanwhile=meanwhile)[0]

    def generate(self, rollout_id: int) -> dict[str, Any]:
        """Prompts to rewarded samples, split over the data-parallel ranks."""
        with self.phase("rollout"):
            made = [self.manager.generate.remote(rollout_id)]
            batch = self.manager_call(made, f"rollout {rollout_id} to be generated", meanwhile=self.faults.tend)
        self.take_rollout(batch)
        return dict(batch)

    def take_rollout(self, batch: dict[str, Any]) -> None:
        """Count a rollout's metrics into the step under way and show a few of its texts."""
        self.pending.update(batch["metrics"])
        self.display.samples(batch["texts"])

    def train(self, rollout_id: int, batch: dict[str, Any]) -> None:
        """Critic first, whose values the actor's advantages need; then the actor."""
        if not self.groups:
            return
        with self.phase("train"):
            values = None
            if self.critic is not None:
                self.take_turn(self.critic)
                result = self.critic.train(rollout_id, batch["refs"])
                values = result["values"]
                self.pending.update(result["metrics"])
            if rollout_id >= self.args.num_critic_only_steps or self.critic is None:
                self.take_turn(self.actor)
                result = self.actor.train(rollout_id, batch["refs"], values)
                self.pending.update(result["metrics"])
                self.pending.update({f"perf/{name}_time": s for name, s in result["timings"].items()})
                if (alarm := gap_alarm(self.args, result["metrics"])) is not None:
                    self.display.note(alarm)
            if not self._told_of_zero_lr and (warning := zero_lr_warning(self.args, self.pending, rollout_id)):
                self._told_of_zero_lr = True
                self.display.note(warning)
            self._refresh_reference(rollout_id)
        self.trained = rollout_id
        self.manager_call([self.manager.trained.remote(rollout_id)], "the rollout manager to close a step's account")
        self._log_memory("train")

    def _refresh_reference(self, rollout_id: int) -> None:
        interval = self.args.ref_update_interval
        if interval and (rollout_id + 1) % interval == 0:
            self.take_turn(self.actor)
            self.actor.copy_weights("actor", "ref")

    def _refresh_old_actor(self) -> None:
        """``--keep-old-actor``: the copy that scores the next rollout is that of the weights which make it.

        Those are the ones that the engines have just got. In the asynchronous loop with an update after every step the
        next rollout is there already, made with the weights before: the copy stays one version behind.
        """
        if not self.args.keep_old_actor or self._old_actor_version == self.version:
            return
        self._old_actor_version = self.version
        self.actor.refresh_old_actor(behind=self.asynchronous and self.args.update_weights_interval == 1)

    def update_weights(self) -> None:
        """Bring the actor's weights to every engine.

        Colocated: optimizer state and gradients go to sleep before the engines get room for weights, and the trainer's
        weights before the engines get room for their cache.
        """
        if self.actor is None or not self.engine_urls:
            return
        with self.phase("update_weights"):
            urls = self.faults.targets()
            self.make_room_for_weights()
            self._onload(("weights",))
            held = self.first_rollout if self.trained is None else max(self.trained + 1, self.first_rollout)
            self.version = f"{self.attempt}.{held}"
            report, urls = self.faults.survive(self._send, urls, replace=True)
            assert report is not None
            self.updated_after, self.held_step = self.trained, held
            self._refresh_old_actor()
        self._log_memory("update_weights")
        if self.args.offload_train:
            with self.display.timers("sleep"):
                for group in self.groups:
                    group.sleep()
            self._log_memory("sleep")
        if self.args.offload_rollout:
            with self.display.timers("onload"):
                self._onload(("kv_cache", "cuda_graph"))
            self._log_memory("onload")
        if self.args.audit_weights:
            with self.phase("audit_weights"):
                worst, urls = self.faults.survive(self.actor.check_probe, urls)
                self.pending["perf/audit_logprob_diff"] = worst if worst is not None else math.nan
        if not urls:  # the last engine was lost just now: once more, with new ones
            self.offload_engines()
            self.update_weights()
            return
        self.faults.served(urls)
        self.pending["perf/update_weights_pause_time"] = report["pause_seconds"]
        self.pending["perf/update_weights_wire_bytes"] = float(report["nbytes"])
        self.pending["perf/update_weights_density"] = report["density"]
        self.pending["perf/update_weights_audit_time"] = report["audit_seconds"]

    def _send(self, urls: list[str]) -> dict[str, Any]:
        same_host = all(urlsplit(url).hostname == self.actor.host for url in urls)
        send = partial(self.actor.update_weights, urls, self.version, same_host, self.faults.slots)
        report = send()
        if self.args.check_weight_update_equal and not self._checked_equal:
            send(check_equal=True)  # once more: this time the engines hold these weights already
            self._checked_equal = True
        return dict(report)

    def heal(self, urls: list[str]) -> None:
        """Bring the version that the other engines hold to these, which were started again."""
        _, urls = self.faults.survive(self._send, urls)
        if self.args.audit_weights:
            _, urls = self.faults.survive(self.actor.check_probe, urls)
        self.faults.served(urls)

    def offload_engines(self) -> None:
        """Colocated: the engines' memory goes to the trainer."""
        if self.args.offload_rollout and self.engine_urls:
            self._log_memory("rollout")
            with self.phase("offload"):
                self.manager_call([self.manager.offload.remote()], "the engines to release memory")
            self._log_memory("offload")
        if self.args.offload_train and self.groups:
            with self.display.timers("wake_up"):
                self.take_turn(self.critic or self.actor)
            self._log_memory("wake_up")

    def make_room_for_weights(self) -> None:
        """Colocated: of the trainer only the weights that engines get stay on the accelerator."""
        if self.args.offload_train:
            self.take_turn(self.actor)
            self.actor.sleep(keep_weights=True)

    def take_turn(self, group: Any) -> None:
        """Colocated: ``group`` is awake and the other asleep, so that the accelerator never holds actor and critic."""
        if self.args.offload_train:
            for other in self.groups:
                if other is not group:
                    other.sleep()
            group.wake()

    def _log_memory(self, phase: str) -> None:
        """``memory/<phase>/…``: GiB in use once a phase is over, where trainer and engines take turns."""
        if self.groups and (self.args.offload_train or self.args.offload_rollout):
            for group in self.groups:
                role = "" if group is self.actor else f"{group.role}_"
                self.pending.update({f"memory/{phase}/{role}{name}": gib for name, gib in group.memory().items()})

    def _onload(self, tags: tuple[str, ...]) -> None:
        if self.args.offload_rollout and self.engine_urls:
            self.manager_call([self.manager.onload.remote(tags)], f"the engines to get {', '.join(tags)} back")

    def evaluate(self, step: int) -> None:
        """All evaluation sets with the engines' weights, which ``step`` rollouts have trained."""
        self.end_evaluation(step, self.start_evaluation(step))

    def start_evaluation(self, step: int) -> Any:
        """Begin it; training may go on, but no update, until :meth:`end_evaluation` has waited for it."""
        return self.manager.eval.remote(step)

    def end_evaluation(self, step: int, evaluation: Any) -> None:
        with self.phase("eval"):
            tend = partial(self.faults.tend, keep_version=True)
            metrics = self.manager_call([evaluation], "the evaluation", meanwhile=tend)
        self.metrics_log.log(metrics, step, "eval/step")
        self.display.eval_line(step, metrics)

    def save(self, rollout_id: int) -> None:
        """One atomic snapshot: all ranks write, one manifest commits. With ``--async-save`` the ranks write while
        the run goes on; until :meth:`finish_save` there is no snapshot."""
        from slime.checkpoint import snapshot

        with self.phase("save_model"):
            self.finish_save()
            temp = snapshot.begin(Path(self.args.save), rollout_id)
            for group in self.groups:
                self.take_turn(group)
                group.save(temp)
            self.manager_call([self.manager.save_state.remote(rollout_id, str(temp))], "the data source to be saved")
            manifest: dict[str, Any] = {
                "rollout_id": rollout_id,
                "attempt": self.attempt,
                "weight_version": self.version,
            }
            manifest |= {"world_size": self.placement.slots.train, "seed": self.args.seed, "metrics": self.pending}
            self._open_snapshot = (temp, {**manifest, "metrics": dict(self.pending), "settings": self._settings()})
            if not self.args.async_save:
                self.finish_save()
            if self.args.save_hf and self.actor is not None:
                self.take_turn(self.actor)
                self.actor.save_hf(str(self.args.save_hf).format(rollout_id=rollout_id))

    def finish_save(self) -> None:
        """Commit the snapshot that is being written, once it is."""
        from slime.checkpoint import snapshot

        if self._open_snapshot is None:
            return
        temp, manifest = self._open_snapshot
        written = [entry for group in self.groups for entry in group.finish_save()]
        snapshot.commit(temp, manifest, written)
        self._open_snapshot = None
        self.saved = manifest["rollout_id"]
        REPORTS.saved()
        if self.args.save_keep_last:
            snapshot.prune(Path(self.args.save), self.args.save_keep_last, self.args.save_retain_interval)

    # --- when --------------------------------------------------------------------------------

    def is_due(self, rollout_id: int, interval: int | None) -> bool:
        """Every ``interval`` rollouts, and after the last."""
        return interval is not None and ((rollout_id + 1) % interval == 0 or rollout_id + 1 == self.num_rollout)

    def evaluates_at_start(self) -> bool:
        """Before the first step, or when the run was interrupted before an evaluation that was due."""
        if self.first_rollout == 0:
            return bool(self.args.eval_interval) and not self.args.skip_eval_before_train
        return self.is_due(self.first_rollout - 1, self.args.eval_interval)

    def end_step(self, rollout_id: int) -> None:
        """Log the step's metrics and begin the next."""
        if self._open_snapshot is not None and not any(group.is_saving() for group in self.groups):
            self.finish_save()
        now = time.perf_counter()
        self._phases = [*self._phases, *self.display.timers.pop_spans()][-KEPT_PHASES:]
        add_phases(trace_of(self.dir.path, rollout_id), self._phases)
        times = self.display.pop_times()
        step_seconds = now - self._step_started
        waited = sum(seconds for name, seconds in times.items() if name != "perf/train_time")
        self.pending.update(times)
        self.pending["perf/step_time"] = step_seconds
        self.pending["perf/wait_time_ratio"] = min(waited / step_seconds, 1.0)
        self._step_started = now
        self.metrics_log.log(self.pending, rollout_id, "rollout/step")
        self.display.step_line(rollout_id, self.num_rollout, self.pending, times)
        self.pending = {}
