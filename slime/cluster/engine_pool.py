"""The inference engines as the driver sees them: which are alive, which weights they hold, and how
they get new ones.

The order of a weight update (in brackets: only if trainer and engines share accelerators)::

    driver (EnginePool)                 trainer (all ranks)              engines
    begin_update  ------------------------------------------------->    health checks pause
    [make room    ------------------->  only weights stay]
    [onload       ------------------------------------------------->    memory for weights]
    send          ------------------->  send, compare checksums ---->   pause, load, continue
    [sleep        ------------------->  nothing stays]
    [onload       ------------------------------------------------->    memory for the KV cache]
    audit         ------------------->  rank 0 compares log-probs -->   score a fixed sequence
    end_update    ------------------------------------------------->    health checks continue, requests arrive

Each arrow is a call for which the driver waits (:mod:`slime.cluster.engine_calls`). If an engine
fails during one, the call is repeated without it. The rollout manager's fleet decides which engines
are lost (``engine_fleet.py``, ``health.py``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from slime.cluster import engine_calls
from slime.cluster.engine import EnginesLost, EngineStatus
from slime.cluster.engine_fleet import EngineFleet
from slime.cluster.rollout_manager import RolloutManager
from slime.engines.sglang_api import EngineError, MemoryTag
from slime.weights.update import UpdateReport, WeightSyncError

if TYPE_CHECKING:
    from slime.backends.base import ModelTag
    from slime.cluster.phases import StepLog
    from slime.cluster.ray_wait import ManagerClient
    from slime.cluster.train_group import TrainGroup
    from slime.cluster.trainer import Trainer
    from slime.config.cluster import ClusterConfig
    from slime.config.weight_sync import WeightSyncConfig

T = TypeVar("T")
POLL_SECONDS = 0.5  # between two polls of sync_recovered_engines
ANSWER_SECONDS = 60.0
RESTART_SECONDS = 1200.0


@dataclass(frozen=True)
class WeightClock:
    """Which weights the engines hold; each update makes a new value.

    Attributes:
        attempt: How often the run was resumed.
        step: The number of steps that had trained these weights.
        trained: The last rollout that was trained when they were sent (``Trainer.trained``).
        model: The copy of the trainer's weights that was sent.
        updates: The number of updates of this process; with 0, the engines hold the weights of the
            checkpoint.
    """

    attempt: int
    step: int
    trained: int | None = None
    model: ModelTag = "actor"
    updates: int = 0

    @property
    def version(self) -> str:
        """The name of these weights, ``<attempt>.<step>``; empty before the first update."""
        return f"{self.attempt}.{self.step}" if self.updates else ""

    def is_checked(self, interval: int) -> bool:
        """Whether this update is one that ``--check-weight-update-equal`` checks: the first, and
        then every ``interval`` updates (0: no other)."""
        return (self.updates - 1) % interval == 0 if interval else self.updates <= 1


@dataclass
class EnginePool:
    """The engines of one run; used only by the driver's main thread, so the trainer is idle during
    every call.

    Attributes:
        urls: The URLs of the engines that hold the current weights; empty in a run without engines.
            If all of them are lost, they are replaced.
        clock: Which weights these are.
        slots: By engine URL, the GPU slots that it occupies, among those of the rollout.
        next_poll: When :meth:`sync_recovered_engines` asks next (``time.monotonic()``).
        syncing: Whether that is running.
    """

    manager: ManagerClient
    trainer: Trainer
    log: StepLog
    urls: list[str]
    clock: WeightClock
    cluster: ClusterConfig
    sync: WeightSyncConfig
    slots: dict[str, range] = field(default_factory=dict)
    next_poll: float = 0.0
    syncing: bool = False

    def __post_init__(self) -> None:
        self.first_step = self.clock.step

    # --- weights -----------------------------------------------------------------------------

    def update_weights(self) -> None:
        """Send the actor's weights to every engine, as in the diagram above; engines that are lost
        are left out.
        """
        trainer = self.trainer
        log = self.log
        actor = trainer.actor
        if actor is None or not self.urls:
            return
        while True:
            with log.phase("update_weights"):
                urls = self._pause_checks().alive or self._replace()
                # Colocated: the engines take memory for the weights only, because the trainer still
                # holds its copy. The KV cache comes back below, after the trainer has gone to
                # sleep.
                trainer.make_room_for_weights()
                self._onload("weights")
                sending = self._next_weights()
                report, urls = self._call_with_failover(
                    partial(self._send, actor, sending), urls, replace_all=True
                )
                assert report is not None
                self.clock = sending
                trainer.old_actor.updated(actor, sending.version)
            trainer.log_memory("update_weights")
            if self.cluster.offload_train:
                with log.display.timers("sleep"):
                    trainer.sleep()
                trainer.log_memory("sleep")
            if self.cluster.offload_rollout:
                with log.display.timers("onload"):
                    self._onload("kv_cache", "cuda_graph")
                trainer.log_memory("onload")
            # After the KV cache is back, since an engine needs it to score the probe. Before
            # end_update, so that a new engine answers no request before its weights were audited.
            if self.sync.audit_weights:
                with log.phase("audit_weights"):
                    worst, urls = self._call_with_failover(actor.check_probe, urls)
                    log.pending["perf/audit_logprob_diff"] = (
                        worst if worst is not None else math.nan
                    )
            if urls:
                break
            # The last engine was lost after it got its weights: the update is repeated with its
            # replacements. In a colocated run, these must first release the memory that the trainer
            # needs.
            self.offload()
        self.end_update(urls)
        log.pending |= {
            "perf/update_weights_pause_time": report.pause_seconds,
            "perf/update_weights_wire_bytes": float(report.nbytes),
            "perf/update_weights_density": report.density,
            "perf/update_weights_audit_time": report.audit_seconds,
        }
        log.record_weights(report)

    def _next_weights(self) -> WeightClock:
        """Which weights the update sends that begins now."""
        trained = self.trainer.trained
        # At the start of a run, nothing was trained here, or --start-rollout-id skips rollouts.
        step = max(self.first_step, 0 if trained is None else trained + 1)
        model, step = self.trainer.old_actor.to_send(step)
        return replace(
            self.clock, step=step, trained=trained, model=model, updates=self.clock.updates + 1
        )

    def _send(self, actor: TrainGroup, weights: WeightClock, urls: list[str]) -> UpdateReport:
        same_host = all(urlsplit(url).hostname == actor.host for url in urls)
        send = partial(
            actor.update_weights, urls, weights.version, same_host, self.slots, weights.model
        )
        report = send()
        # If the checksums of an engine cannot be predicted, only this notices that a part of a
        # tensor was not written: the engines already hold these weights; overwrite them, send them
        # again, compare.
        if self.sync.check_weight_update_equal and weights.is_checked(
            self.sync.check_weight_update_interval
        ):
            send(check_equal=True)
        return report

    # --- memory of colocated runs ------------------------------------------------------------

    def offload(self) -> None:
        """In a colocated run, let the engines release their memory, then let the trainer take
        it.
        """
        if self.cluster.offload_rollout and self.urls:
            self.trainer.log_memory("rollout")
            with self.log.phase("offload"):
                self._move_memory("to release memory", engine_calls.offload)
            self.trainer.log_memory("offload")
        self.trainer.wake()

    def _onload(self, *tags: MemoryTag) -> None:
        self._move_memory(f"to get {', '.join(tags)} back", engine_calls.onload, tags)

    def _move_memory(self, what: str, call: Callable[..., None], *arguments: object) -> None:
        if self.cluster.offload_rollout:
            self.manager.call(f"the engines {what}", RolloutManager.on_engines, call, *arguments)

    def end_for_save(self) -> None:
        """Before the last snapshot of a run that is being stopped, end the engines if the trainer
        needs their memory.

        Engines cannot release their memory while they generate, and what they are generating will
        not be used.
        """
        if self.cluster.offload_train and self.urls:
            self.manager.call("the engines to end", RolloutManager.end_engines)

    # --- engines that are lost ---------------------------------------------------------------

    def _pause_checks(self) -> EngineStatus:
        """Pause the health checks until :meth:`end_update`."""
        return self._status("the engines before an update", engine_calls.begin_update)

    def end_update(self, urls: Sequence[str]) -> None:
        """Let these engines get requests: they hold the current weights and have passed the
        audit.
        """
        status = self._status("the engines after an update", engine_calls.end_update, urls)
        self.urls = status.alive or self.urls

    def _call_with_failover(
        self, call: Callable[[list[str]], T], urls: list[str], replace_all: bool = False
    ) -> tuple[T | None, list[str]]:
        """Call ``call(urls)``; if engines are lost during the call, repeat it without them.

        If another engine's failure interrupted an engine's update, that engine remains, and the
        repeated call sends it all weights. If no engine is to blame, the error propagates. Without
        ``--use-fault-tolerance``, an engine is only to blame if its process has ended; then the run
        ends with what is known about it.

        Args:
            replace_all: If no engine remains, restart engines and continue with these; otherwise
                return ``(None, [])``.

        Returns:
            The result of the call, and the URLs of the remaining engines.
        """
        while urls:
            try:
                return call(urls), urls
            except (WeightSyncError, EngineError) as error:
                # Through Ray, an error arrives as an instance of a derived class with the original
                # in ``cause``.
                failed = getattr(getattr(error, "cause", error), "failed", {})
                blamed = {url: str(reason) for url, reason in failed.items()}
                alive = self._status(
                    "the engines that failed",
                    engine_calls.lose_engines,
                    blamed if self.cluster.use_fault_tolerance else None,
                ).alive
                left = [url for url in urls if url in alive]
                if len(left) == len(urls):  # No engine is to blame: the same call would fail again.
                    raise
                self.log.note(
                    f"lost {', '.join(url for url in urls if url not in left)} during a weight "
                    f"update; going on with {', '.join(left) or 'none'}"
                )
                urls = left
                if replace_all and not left:
                    urls = self._replace()
                    self._onload("weights")  # as update_weights did for the engines that were lost
        return None, []

    def _replace(self) -> list[str]:
        """Restart the lost engines because none is left; wait until they have started, and return
        their URLs.

        An engine takes its share of the memory that is free when it starts, so in a colocated run
        the trainer first releases all of its memory. On return, the engines have released theirs,
        and the trainer's weights are back.
        """
        if not self.cluster.use_fault_tolerance:
            raise EnginesLost("no engine is left (--use-fault-tolerance starts lost engines again)")
        self.trainer.sleep()
        urls = self._status(
            "engines that are started again",
            engine_calls.start_lost_engines,
            deadline=RESTART_SECONDS,
        ).alive
        if not urls:
            raise EnginesLost("no engine could be started again; see the logs")
        self._move_memory("to release memory", engine_calls.offload)
        self.trainer.make_room_for_weights()
        return urls

    def sync_recovered_engines(self, keep_version: bool = False) -> None:
        """Send the current weights to engines that were restarted; after that, they get requests.

        The driver calls this repeatedly while it waits for generation. It polls at most every
        :data:`POLL_SECONDS`.

        Args:
            keep_version: As long as an engine serves, send no newer weights than it holds. Set
                during an evaluation, which measures one version.

        Raises:
            EnginesLost: The run cannot continue.
        """
        now = time.monotonic()
        # The update below waits for the manager as well, and that wait may call this method again.
        if self.syncing or now < self.next_poll or not self.urls:
            return
        self.next_poll = now + POLL_SECONDS
        self.syncing = True
        try:
            status = self._status("the engines", EngineFleet.status)
            if status.unsynced and self.trainer.actor is not None:
                self._sync_recovered(self.trainer.actor, status, keep_version)
        finally:
            self.syncing = False

    def _sync_recovered(self, actor: TrainGroup, status: EngineStatus, keep_version: bool) -> None:
        """Send weights to restarted engines such that all engines of the run hold the same version.

        If the trainer has trained a step since the last update, the weights of that update exist
        only as the copy of ``--keep-old-actor``. Without it, all engines get the newest weights.
        """
        copy: ModelTag | None = self.clock.model
        if self.trainer.trained != self.clock.trained:
            copy = self.trainer.old_actor.engines_copy
        if self.cluster.offload_train or self.cluster.offload_rollout:
            # While an engine serves, the trainer has no memory: the restarted engines wait for the
            # next update. If none serves, waiting would not end, because the rollout cannot finish.
            if status.serving:
                return
            self.offload()
            self.update_weights()
        elif copy is None:
            if keep_version and status.serving:
                return
            self.update_weights()
        else:
            self.clock = replace(self.clock, model=copy)
            self._pause_checks()
            _, urls = self._call_with_failover(
                partial(self._send, actor, self.clock), status.unsynced
            )
            if self.sync.audit_weights:
                _, urls = self._call_with_failover(actor.check_probe, urls)
            self.end_update(urls)
        self.log.note(
            f"engines started again, with the current weights: {', '.join(status.unsynced)}"
        )

    def _status(
        self,
        what: str,
        call: Callable[..., EngineStatus],
        *arguments: object,
        deadline: float = ANSWER_SECONDS,
    ) -> EngineStatus:
        """Call a function with the fleet that returns the state of its engines.

        Raises:
            EnginesLost: The run cannot continue.
        """
        asked = self.manager.start(RolloutManager.on_engines, call, *arguments)
        # The manager may have to wait for a running check.
        deadline += 4 * self.cluster.rollout_health_check_timeout
        status = self.manager.wait(asked, what, deadline)
        if status.fatal:
            raise EnginesLost(status.fatal)
        self.slots = status.slots
        return status
