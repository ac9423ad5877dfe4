"""One engine of a run: its state, and the actors that own its server processes, one on each node
that it spans.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar

from slime.cluster.actors import ActorError, ActorHandle, NoAnswer, Supervised, door
from slime.engines.launch import EngineSettings, EngineSpec, RouterSettings, start_engine
from slime.engines.router import Worker

if TYPE_CHECKING:
    from slime.observability.trace_file import Load

A = TypeVar("A")
T = TypeVar("T")
ACTOR_MARGIN_SECONDS = 120.0  # for placing and starting the actor itself
ASK_SECONDS = 15.0  # An actor that does not answer for this long is lost.
SILENT_SECONDS = 2.0  # deadline of further calls to such an actor
KILL_SECONDS = 30.0
State = Literal["starting", "unsynced", "serving", "lost", "given up"]
GONE: tuple[State, ...] = ("lost", "given up")
"""States of engines whose server process was killed, together with the actors that could report on
it.
"""


class ServerFacts(TypedDict):
    """What the actor of an engine reports about its server process; ``fate`` as in
    ``ServerProcess``.
    """

    pid: int
    alive: bool
    fate: str
    bootstrap_port: int | None


class EngineActor:
    """Starts the server, reports on its health, and stops it. The server dies with this process.

    Args:
        start_seconds: How long the server may take until it answers.
        gpu_ids: GPUs of this node that the server sees; None means those that this actor has.
        node: Node rank, number of nodes and rendezvous address of a server that spans several
            nodes.
    """

    def __init__(
        self,
        settings: EngineSettings,
        start_seconds: float,
        spec: EngineSpec,
        log_dir: Path,
        gpu_ids: Sequence[int] | None,
        node: tuple[int, int, str | None],
    ) -> None:
        self.start_seconds = start_seconds
        name = f"{spec.index}" if node[0] == 0 else f"{spec.index}-node{node[0]}"
        door().log_to(log_dir, f"engine-actor-{name}")
        self.process = start_engine(
            settings, spec, door().address(), log_dir / f"engine-{name}.log", gpu_ids, node
        )

    def wait_ready(self) -> str:
        """Block until the server answers, and return its URL.

        Raises:
            ServerFailed: With the server's last log lines.
        """
        self.process.wait_ready(self.start_seconds)
        return self.process.url

    def describe(self) -> ServerFacts:
        process = self.process
        return {
            "pid": process.pid,
            "alive": process.alive(),
            "fate": process.fate,
            "bootstrap_port": process.bootstrap_port,
        }

    def ask(self, method: str) -> Any:
        """Call a method of the server; see :class:`~slime.engines.launch.RunningEngine`."""
        return getattr(self.process, method)()


@dataclass
class Engine(Supervised):
    """One engine position in the run; a restarted engine keeps it. Every call of its actors has a
    deadline.

    Attributes:
        external: Whether this run does not start the server.
        actors: One per node; the server of the first one answers requests. Empty before the start,
            and if it is external.
        ready_at: When its last start was complete (``time.monotonic()``).
        ending: Whether it is lost and its processes are still being ended.
    """

    spec: EngineSpec
    url: str = ""
    state: State = "starting"
    external: bool = False
    actors: Sequence[ActorHandle] = ()
    bootstrap_port: int | None = None
    ready_at: float = 0.0
    ending: bool = False
    _silent: Sequence[ActorHandle] = ()
    """The actors, if they did not answer the last call; after a restart there are others."""

    @property
    def index(self) -> int:
        return self.spec.index

    @property
    def worker(self) -> Worker:
        return Worker(
            self.url, self.spec.model, self.spec.worker_type, self.bootstrap_port, self.index
        )

    def wait_ready(self, seconds: float) -> None:
        """Block until the server answers; an error has its last log lines. Its address changes with
        every start.

        Args:
            seconds: How long the server may take.
        """
        self.url = str(self._get("wait_ready", seconds=seconds + ACTOR_MARGIN_SECONDS)[0])
        self.ready_at = time.monotonic()
        if self.spec.worker_type == "prefill":
            self.bootstrap_port = self.describe()["bootstrap_port"]

    def describe(self) -> ServerFacts:
        """State of the server; alive means alive on all nodes. Raises if a node does
        not answer.
        """
        of_nodes: list[ServerFacts] = self._get("describe")
        return {
            **of_nodes[0],
            "alive": all(part["alive"] for part in of_nodes),
            "fate": next((part["fate"] for part in of_nodes if part["fate"]), ""),
        }

    def log_tail(self) -> str:
        return "\n".join(self._get("ask", "log_tail"))

    def cpu_seconds(self) -> float:
        """CPU time that the server and all its children have used since they started."""
        return float(sum(self._get("ask", "cpu_seconds")))

    def end_of_log(self, reason: str) -> str:
        """The last lines of its log, or ``reason`` where there is none."""
        if self.external:
            return (
                f"{reason}; this run did not start it: start it again by hand, it is taken back "
                "when it answers"
            )
        try:
            return self.log_tail()
        except Exception as error:  # For example, the node is gone.
            return f"{reason}; its log cannot be read: {error}"

    def lost(self, reason: str) -> str:
        return f"engine {self.index} ({self.url}) was lost: {reason}"

    def report(self) -> str:
        """One line, and the last lines of the log if its process is gone."""
        gone = self.state in GONE
        pid = ""
        end = self.last_words if gone else None
        if self.actors and not gone:
            try:
                facts = self.describe()
                pid = f" pid {facts['pid']}"
                end = None if facts["alive"] else self.end_of_log("it ended")
            except Exception as error:
                end = self.end_of_log(str(error))
        state = self.state if end is None else f"DEAD\n{end}"
        return f"engine {self.index} {self.url}{pid}: {state}"

    def kill(self) -> None:
        """Kill the server with all its children, even if it is stopped (SIGSTOP), then its actor.
        Never raises.
        """
        # The actor kills the server's whole process tree. If it does not answer, the server still
        # dies with the actor.
        with contextlib.suppress(Exception):
            self._get("ask", "kill", seconds=KILL_SECONDS)
        for actor in self.actors:
            with contextlib.suppress(ActorError):
                door().kill(actor)

    def stop(self) -> None:
        """Stop the server gracefully; its actor stays."""
        with contextlib.suppress(Exception):
            self._get("ask", "stop", seconds=ACTOR_MARGIN_SECONDS)

    def _get(self, method: str, *arguments: str, seconds: float = ASK_SECONDS) -> list[Any]:
        """Call a method of all actors and return their answers.

        If the last call was not answered, this one gets only :data:`SILENT_SECONDS`: several calls
        are made while a lost engine is being ended, and they must not each wait for a node that is
        gone.
        """
        actors = self.actors
        asked = [getattr(actor, method).remote(*arguments) for actor in actors]
        try:
            answers = door().get(asked, SILENT_SECONDS if actors is self._silent else seconds)
        except NoAnswer:
            self._silent = actors
            raise
        self._silent = ()
        return answers


@dataclass(frozen=True)
class EngineStatus:
    """The engines that get the trainer's weights, as reported to the driver.

    Attributes:
        serving: URLs of the engines that hold the current weights and get requests.
        unsynced: URLs of the engines that were restarted and wait for weights.
        slots: By engine URL, the GPU slots that it occupies, among those of the rollout.
        fatal: Why the run must end, or None.
    """

    serving: list[str]
    unsynced: list[str]
    slots: dict[str, range]
    fatal: str | None

    @property
    def alive(self) -> list[str]:
        """URLs of all these engines."""
        return [*self.serving, *self.unsynced]


@dataclass(frozen=True)
class FleetSettings:
    """What the fleet does with its engines.

    Attributes:
        tolerant: Whether lost engines and routers are started again (``--use-fault-tolerance``), or
            end the run.
        always_routed: Whether a single engine gets a router as well (``--use-router``, or a run that
            goes on without lost engines).
        updated: Whether the run has a trainer that sends weights.
        start_seconds: How long a server may take to start.
        workers: Number of rollout workers, among which the engines are divided.
        check_interval: Seconds between two checks whether an engine generates a token.
        check_timeout: Seconds within which it must.
        first_wait: Seconds after a pause during which engines are not asked for a token.
    """

    router: RouterSettings
    tolerant: bool
    always_routed: bool
    updated: bool
    start_seconds: float
    workers: int = 0
    check_interval: float = 30.0
    check_timeout: float = 30.0
    first_wait: float = 0.0


def at_once(call: Callable[[A], T], items: Sequence[A]) -> list[T]:
    """Call a function of all items at the same time, on threads."""
    with ThreadPoolExecutor(max(len(items), 1)) as pool:
        return list(pool.map(call, items))


class LoadRecord(Protocol):
    """What asks the engines how many requests they run, while a run goes on."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def between(self, start: float, end: float) -> list[Load]:
        """Return what was measured between two wall times."""


class EnginesLost(RuntimeError):
    """The run cannot continue; the message says which engine was lost, why, and what to do."""
