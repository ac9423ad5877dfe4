"""The engines of a run and the router in front of them: which engines serve, are lost, or wait for
weights.

The state of an engine goes ``starting -> unsynced -> serving``, and from any state to ``lost``. The
router only knows serving engines, so a restarted engine gets no request before it holds the current
weights.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from slime.cluster.engine import (
    GONE,
    Engine,
    EngineStatus,
    FleetSettings,
    LoadRecord,
    State,
    at_once,
)
from slime.cluster.health import HealthMonitor
from slime.cluster.ray_wait import wait_for
from slime.config.engine import DEFAULT_MODEL
from slime.engines.keys import RunKeys, send_key
from slime.engines.launch import EngineSpec
from slime.engines.process import ServerFailed
from slime.engines.router import Routers, Worker

if TYPE_CHECKING:
    from slime.cluster.actors import ActorHandle

logger = logging.getLogger(__name__)


class EngineFleet:
    """All engines of a run; see the module's docstring.

    Calls come from several threads, and every change of an engine's state is made under the lock.
    Calls to hosts and to the router may take long, so they are made without it.

    Args:
        launch: Starts the actors of the engine with the given index, which start its server;
            returns at once.
        specs: The engines that this run starts.
        external: URLs of servers that are already running.
        keys: The keys of engines and routers.

    Attributes:
        addresses: The values of ``args`` by which users' functions reach the engines:
            ``sglang_router_ip`` and ``sglang_router_port`` (of the first model's router, or of the
            only engine) and ``sglang_model_routers``.
        shares: Number of parts into which the engines are divided; 0: they are not.
    """

    def __init__(
        self,
        settings: FleetSettings,
        log_dir: Path,
        launch: Callable[[int], Sequence[ActorHandle]],
        specs: Sequence[EngineSpec],
        external: Sequence[str],
        keys: RunKeys,
    ) -> None:
        self.keys = keys
        self.settings = settings
        self.log_dir = log_dir
        self.launch = launch
        num_own = len(specs)
        self.engines = engines = [Engine(spec) for spec in specs]
        engines += [
            Engine(EngineSpec(num_own + i, "", slot=i), url.rstrip("/"), "serving", external=True)
            for i, url in enumerate(external)
        ]
        for engine in engines[num_own:]:
            send_key(engine.url, self.keys.engine)
        # Only engines of one kind, behind a router of this run, are divided.
        alike = all(
            (e.spec.model, e.spec.worker_type) == (DEFAULT_MODEL, "regular") for e in engines
        )
        divided = alike and len(engines) > 1 and settings.router.address is None
        self.shares = min(settings.workers, len(engines)) if divided else 0
        self.num_own = num_own
        self.router: Routers | None = None
        self.addresses: dict[str, object] = {}
        self.fatal: str | None = None
        self.counted: Counter[str] = Counter()  # since the last call of counts()
        self.lock = threading.RLock()
        # held while routers are restarted; always taken before the other
        self._router_lock = threading.Lock()
        # enough threads to start or end all engines at the same time
        self._threads = ThreadPoolExecutor(2 * len(engines) + 1, thread_name_prefix="engines")
        self.monitor = HealthMonitor(self)
        self.loads: LoadRecord | None = None

    # --- the state of all engines ------------------------------------------------------------

    def urls(self, *states: State) -> list[str]:
        """URLs of the engines in one of ``states``; by default of all that answer, whatever weights
        they hold.
        """
        states = states or ("serving", "unsynced")
        with self.lock:
            return [engine.url for engine in self.engines if engine.state in states]

    def status(self) -> EngineStatus:
        with self.lock:
            updated = [engine for engine in self.engines if engine.spec.updates]
            serving, unsynced = (
                [e.url for e in updated if e.state == state] for state in ("serving", "unsynced")
            )
            slots = {e.url: range(e.spec.slot, e.spec.slot + e.spec.num_gpus) for e in updated}
        return EngineStatus(serving, unsynced, slots, self.fatal)

    def counts(self) -> dict[str, float]:
        """Metrics: engines lost, engines restarted and routers restarted since the last call."""
        names = ("engine_lost", "engine_restart", "router_restart")
        with self.lock:
            counts = {f"rollout/{name}_count": float(self.counted[name]) for name in names}
            self.counted.clear()
        return counts

    def report(self) -> str:
        """One line per engine, with the last log lines of those that are gone."""
        return "\n".join(at_once(Engine.report, self.engines)) or "no engine was started"

    # --- start and end -----------------------------------------------------------------------

    def begin(self) -> None:
        """Let the servers of all engines start in the background."""
        for engine in self.engines[: self.num_own]:
            engine.actors = engine.actors or self.launch(engine.index)

    def start(self, progress: Callable[[int, int], None]) -> None:
        """Start all engines at the same time, then the router. The first failure propagates.
        ``progress`` gets the number of engines that have started and that of all."""
        self.begin()
        for done, engine in enumerate(self.engines[: self.num_own], start=1):
            self.wait_ready(engine)
            # without "unsynced": no request comes before the run's first weight update
            engine.state = "serving"
            progress(done, self.num_own)
        self.start_routers()

    def wait_ready(self, engine: Engine) -> None:
        engine.wait_ready(self.settings.start_seconds)
        send_key(engine.url, self.keys.engine)

    def _workers(self) -> list[Worker]:
        return [engine.worker for engine in self.engines if engine.state == "serving"]

    def start_routers(self) -> None:
        """Start the routers, unless a single engine needs none, and set :attr:`addresses`."""
        workers = self._workers()
        if not workers:
            return
        url = workers[0].url
        models: object = {}
        settings = self.settings.router
        if len(workers) > 1 or self.settings.always_routed or settings.address is not None:
            self.router = Routers(settings, self.log_dir, self.shares)
            self.router.start(workers)
            url = self.router.url
            models = self.router.addresses
        self.addresses = _addresses(url, models)

    def addresses_of(self, worker: int) -> dict[str, object]:
        """Return :attr:`addresses` as a rollout worker gets them: with the router of its share of
        the engines.
        """
        if self.router is None or not self.shares:
            return self.addresses
        url = list(self.router.by_share.values())[worker % self.shares].url
        address = urlsplit(url)
        models = dict.fromkeys(self.router.addresses, (address.hostname, address.port))
        return _addresses(url, models)

    def stop(self, now: bool = False) -> None:
        """Stop router and engines; returns when their processes have ended. Safe to call twice.

        Args:
            now: Kill the engines instead of stopping them gracefully, because their memory is
                needed.
        """
        self.monitor.stop()
        if self.loads is not None:
            self.loads.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.router is not None:
            self.router.stop()
        at_once(
            Engine.kill if now else Engine.stop,
            [engine for engine in self.engines if engine.actors and engine.state not in GONE],
        )

    # --- lost engines ------------------------------------------------------------------------

    def lose(self, reasons: Mapping[str, str]) -> None:
        """Remove engines from the router and end their processes; their requests are repeated on
        other engines.

        All of them are ended at the same time, so that one whose node does not answer delays no
        other. Without ``--use-fault-tolerance``, this ends the run (:attr:`fatal`).

        Args:
            reasons: Why each engine is lost, by URL. Engines that are already lost are left alone.
        """
        self.end(self.mark_lost(reasons))

    def mark_lost(self, reasons: Mapping[str, str]) -> list[Engine]:
        """The part of :meth:`lose` that does not wait: set the state. Returns the lost engines, for
        :meth:`end`.
        """
        lost = []
        with self.lock:
            for engine in self.engines:
                if engine.url not in reasons or engine.state not in ("serving", "unsynced"):
                    continue
                # ``ending`` keeps restart_lost from starting the engine while its old processes
                # hold memory and ports.
                engine.state = "lost"
                engine.ending = True
                engine.note_loss(reasons[engine.url])
                self.counted["engine_lost"] += 1
                lost.append(engine)
                if not self.settings.tolerant:
                    self.fatal = self.fatal or (
                        f"{engine.lost(engine.last_words)}\n--use-fault-tolerance goes on without "
                        "it and starts it again"
                    )
        for engine in lost:
            logger.error(f"engine {engine.index} ({engine.url}) is lost: {engine.last_words}")
        return lost

    def end(self, lost: Sequence[Engine], wait: bool = True) -> None:
        """End the processes of lost engines, all at the same time; with ``wait``, return when that
        has ended.
        """
        ending = [self._threads.submit(self._end, engine) for engine in lost]
        if wait:
            for future in ending:
                future.result()

    def _end(self, engine: Engine) -> None:
        reason = engine.last_words
        try:
            # Before the kill: it also ends the actor that can read the log, and the requests that
            # fail with it are repeated, so the router should no longer send them here.
            engine.last_words = engine.end_of_log(reason)
            self._forget(engine.url)
            engine.kill()  # also resets the connections of requests that hang in this engine
        finally:
            with self.lock:
                engine.ending = False
                self._after_loss(engine, reason)

    def _after_loss(self, engine: Engine, reason: str) -> None:
        """Decide, under the lock, whether the engine is worth another start and whether the run can
        continue.
        """
        what = engine.lost(reason)
        if not engine.external and engine.hopeless:
            engine.state = "given up"
            logger.error(f"{what}, {engine.how_often}: it is not started again")
        # Only an engine of the same model and role (regular, prefill or decode) can take over its
        # requests. An external engine that is lost cannot be restarted by this run.
        kind = (engine.spec.model, engine.spec.worker_type)
        peers = [e for e in self.engines if (e.spec.model, e.spec.worker_type) == kind]
        hopeless = all(e.state == "given up" or (e.state == "lost" and e.external) for e in peers)
        if hopeless and self.fatal is None:
            which = ""
            if len(peers) < len(self.engines):
                which = f" ({kind[1]}) of model {kind[0]}"
            self.fatal = f"no engine{which} is left; the last one: {what}\n{engine.last_words}"

    def _forget(self, url: str) -> None:
        if self.router is None:
            return
        try:
            self.router.remove_worker(url)
        # The router is dead as well; its restart leaves this engine out.
        except (ServerFailed, OSError) as error:
            logger.warning(f"the router could not remove {url}: {error}")

    # --- restarts ----------------------------------------------------------------------------

    def restart_lost(self) -> None:
        """Restart the lost engines that this run has started; returns at once."""
        if not self.settings.tolerant or self.fatal is not None:
            return
        with self.lock:
            lost = [
                e for e in self.engines if e.state == "lost" and not e.external and not e.ending
            ]
            for engine in lost:
                engine.state = "starting"
        for engine in lost:
            self.counted["engine_restart"] += 1
            self._threads.submit(self._restart, engine)

    def _restart(self, engine: Engine) -> None:
        logger.warning(f"engine {engine.index} is started again")
        try:
            engine.actors = self.launch(engine.index)
            self.wait_ready(engine)
        # Whatever the reason was, the next poll tries again, until it is hopeless.
        except Exception as error:
            logger.error(f"engine {engine.index} could not be started again: {error}")
            engine.kill()
            with self.lock:
                engine.state = "lost"
                engine.note_loss(str(error))
                self._after_loss(engine, f"it could not be started again: {error}")
            return
        with self.lock:
            engine.state = "unsynced"
        logger.warning(f"engine {engine.index} is up again at {engine.url} and waits for weights")
        # No update will come for this engine: the weights of the checkpoint are the current ones.
        if not (self.settings.updated and engine.spec.updates):
            self.synced([engine.url])

    def readmit(self, urls: Sequence[str]) -> None:
        """Take back external engines that answer again: they get the current weights, then
        requests.
        """
        with self.lock:
            for engine in self.engines:
                if engine.url in urls and engine.state == "lost":
                    logger.warning(f"external engine {engine.url} is back and waits for weights")
                    engine.state = "unsynced"

    def synced(self, urls: Sequence[str]) -> None:
        """Let engines serve that hold the current weights and were audited; those that already
        serve are left alone.
        """
        for engine in self.engines:
            url = engine.url
            if url not in urls or engine.state != "unsynced":
                continue
            try:
                # It may have ended during the update, while the health checks were paused.
                self.check_router()
                if self.router is not None:
                    self.router.add_worker(engine.worker)
            except (ServerFailed, OSError) as error:
                self.lose({url: f"the router did not take it: {error}"})
                continue
            # While the router was called without the lock, the engine may have been lost and even
            # have a new address.
            with self.lock:
                serves = engine.state == "unsynced" and engine.url == url
                if serves:
                    engine.state = "serving"
            if serves:
                logger.warning(f"engine {engine.index} ({url}) serves")
            else:
                self._forget(url)

    def settled(self) -> None:
        """Wait until no engine is being started or ended."""

        def done() -> bool:
            with self.lock:
                return not any(e.state == "starting" or e.ending for e in self.engines)

        wait_for(
            "engines that are started again",
            done,
            self.settings.start_seconds,
            report=self.report,
        )

    # --- the router --------------------------------------------------------------------------

    def check_router(self) -> None:
        """Restart routers that ended or hang; one that fails to start is tried again at the next
        check.

        With many engines a start takes a while. The fleet's lock is free during it, so engines that
        were lost meanwhile are removed from the new router afterwards.
        """
        with self._router_lock:
            router = self.router
            if router is None or self.fatal is not None:
                return
            for model, words in router.dead():
                logger.error(words)
                if not self.settings.tolerant:
                    self.fatal = f"{words}\n--use-fault-tolerance starts it again"
                    return
                self.counted["router_restart"] += 1
                with self.lock:
                    workers = self._workers()
                try:
                    router.restart(model, workers)
                    serving = self.urls("serving")
                    for worker in workers:
                        if worker.url not in serving:
                            router.remove_worker(worker.url)
                # A worker may hang, for example; the health checks find it.
                except (ServerFailed, OSError) as error:
                    logger.error(f"the router could not be started again: {error}")
                    continue
                logger.warning(f"the router of {model} serves again")


def _addresses(url: str, models: object) -> dict[str, object]:
    address = urlsplit(url)
    return {
        "sglang_router_ip": address.hostname or "127.0.0.1",
        "sglang_router_port": address.port or 80,
        "sglang_model_routers": models,
    }
