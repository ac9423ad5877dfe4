"""What the driver does about engines that were lost: leave them out, sync again, bring back those that were
started again. What is lost is decided next to the engines (``engine_fleet.py``, ``health.py``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from slime.cluster.engine_fleet import EnginesLost
from slime.engines.handle import EngineError
from slime.weights.fleet import WeightSyncError

if TYPE_CHECKING:
    from slime.cluster.run import Run

T = TypeVar("T")
TEND_SECONDS = 0.5
ANSWER_SECONDS = 60.0
RESTART_SECONDS = 1200.0


class Faults:
    """Belongs to one :class:`Run`; used by its main thread only, so the trainer is idle in every call."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._tending = False
        self._next = 0.0
        self.slots: dict[str, range] = {}  # engine URL to its places among the rollout's

    # --- around a weight update --------------------------------------------------------------

    def targets(self) -> list[str]:
        """Engines that an update goes to. They are not looked at until :meth:`served`.

        Raises:
            EnginesLost: the run cannot go on.
        """
        return self._alive(self._call("begin_update", "the engines before an update")) or self._replacements()

    def survive(
        self, call: Callable[[list[str]], T], urls: list[str], replace: bool = False
    ) -> tuple[T | None, list[str]]:
        """``call(urls)``; when engines are lost under way, again without them. Returns its result and who is left.

        Engines whose update was torn by another's end are among those that are left: the call that is repeated
        gives them the whole of it. Without ``--use-fault-tolerance``, and when nobody is to blame, the error
        propagates.

        Args:
            replace: when none is left, go on with engines that are started now; otherwise return ``(None, [])``.
        """
        while urls:
            try:
                return call(urls), urls
            except (WeightSyncError, EngineError) as error:
                if not self.run.args.use_fault_tolerance:
                    raise
                blamed = {u: str(e) for u, e in getattr(getattr(error, "cause", error), "failed", {}).items()}
                alive = self._alive(self._call("lose_engines", "the engines that failed", blamed))
                left = [url for url in urls if url in alive]
                if len(left) == len(urls):
                    raise
                lost = ", ".join(url for url in urls if url not in left)
                self.run.display.note(f"lost {lost} during a weight update; going on with {', '.join(left) or 'none'}")
                urls = left
                if replace and not left:
                    urls = self._replacements()
                    if self.run.args.offload_rollout:  # as Run.update_weights did for those that were lost
                        room = [self.run.manager.onload.remote(("weights",))]
                        self.run.manager_call(room, "the new engines to get room for weights")
        return None, []

    def served(self, urls: Sequence[str]) -> None:
        """These engines hold the current weights and were audited: they get requests."""
        status = self._call("end_update", "the engines after an update", list(urls))
        self.run.engine_urls = self._alive(status) or self.run.engine_urls  # never none: they are being replaced

    def _replacements(self) -> list[str]:
        """No engine is left: wait for those that are started again, in the memory that they need. Colocated, they have
        released it again when this returns, and the trainer's weights are awake."""
        run = self.run
        if not run.args.use_fault_tolerance:
            raise EnginesLost("no engine is left")
        if run.args.offload_train:
            for group in run.groups:
                group.sleep()
        urls = self._alive(self._call("start_lost_engines", "engines that are started again", deadline=RESTART_SECONDS))
        if not urls:
            raise EnginesLost("no engine could be started again; see the logs")
        if run.args.offload_rollout:
            run.manager_call([run.manager.offload.remote()], "the new engines to release memory")
        if run.args.offload_train:
            run.make_room_for_weights()
        return urls

    # --- while generation is under way -------------------------------------------------------

    def tend(self, keep_version: bool = False) -> None:
        """Called over and over while the driver waits for generation: engines that were started again get the
        current weights, and then requests. Raises :class:`EnginesLost` when the run cannot go on.

        Args:
            keep_version: as long as an engine serves, none gets newer weights (an evaluation is of one version).
        """
        now = time.monotonic()
        if self._tending or now < self._next or not self.run.engine_urls:
            return
        self._next, self._tending = now + TEND_SECONDS, True
        try:
            status = self._call("engine_status", "the engines")
            self._alive(status)
            if status["unsynced"] and self.run.actor is not None:
                self._heal(status, keep_version)
        finally:
            self._tending = False

    def _heal(self, status: dict[str, Any], keep_version: bool) -> None:
        """The engines of one run never hold different versions: where the trainer has trained on since the last
        update, all of them get a new one."""
        run = self.run
        if run.args.offload_train or run.args.offload_rollout:
            if status["serving"]:
                return  # there is no room for the trainer: they wait for the next update
            run.offload_engines()
            run.update_weights()
        elif run.trained != run.updated_after:
            if keep_version and status["serving"]:
                return
            run.update_weights()
        else:
            self._call("begin_update", "the engines before an update")
            run.heal(status["unsynced"])
        run.display.note(f"started again, with the current weights: {', '.join(status['unsynced'])}")

    def _call(self, method: str, what: str, *arguments: Any, deadline: float = ANSWER_SECONDS) -> dict[str, Any]:
        answer = getattr(self.run.manager, method).remote(*arguments)
        look = 4 * self.run.args.rollout_health_check_timeout  # one may be under way
        return dict(self.run.manager_call([answer], what, deadline + look))

    def _alive(self, status: dict[str, Any]) -> list[str]:
        if status["fatal"]:
            raise EnginesLost(status["fatal"])
        self.slots = status.get("slots", {})
        return [*status["serving"], *status["unsynced"]]
