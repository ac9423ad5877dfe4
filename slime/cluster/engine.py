"""One engine of a run: where its server process lives, and what state it is in."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypedDict

from slime.engines.plan import EngineSpec
from slime.engines.router import Worker

if TYPE_CHECKING:
    from slime.cluster.engine_actor import RayEngineHost

State = Literal["starting", "unsynced", "serving", "lost", "given up"]
GONE: tuple[State, ...] = ("lost", "given up")
"""States of engines whose processes were killed, with the actor that could be asked about them."""


class ServerFacts(TypedDict):
    """What the host of an engine says of its server process."""

    url: str
    pid: int
    alive: bool
    bootstrap_port: int | None


@dataclass
class Engine:
    """One place for an engine. ``host`` is None for a server that is not ours to start."""

    spec: EngineSpec
    host: RayEngineHost | None
    url: str = ""
    bootstrap_port: int | None = None
    state: State = "starting"
    losses: list[float] = field(default_factory=list)  # when, time.monotonic()
    ready_at: float = 0.0  # time.monotonic(), of its last start
    ending: bool = False  # lost, and its processes are being ended
    last_words: str = ""

    @property
    def index(self) -> int:
        return self.spec.index

    @property
    def external(self) -> bool:
        return self.host is None

    @property
    def worker(self) -> Worker:
        return Worker(self.url, self.spec.model, self.spec.worker_type, self.bootstrap_port)

    def wait_ready(self) -> None:
        """Block until it answers; its address is new with every start."""
        assert self.host is not None
        self.url = self.host.wait_ready()
        self.ready_at = time.monotonic()
        if self.spec.worker_type == "prefill":
            self.bootstrap_port = self.host.describe()["bootstrap_port"]


@dataclass(frozen=True)
class EngineStatus:
    """The engines that get the trainer's weights, as the driver is told.

    Attributes:
        serving: URLs of those that hold the current weights and get requests.
        unsynced: URLs of those that were started again and wait for weights.
        slots: engine URL to the GPU slots that it occupies, among the rollout's.
        fatal: why the run must end, or None.
    """

    serving: list[str] = field(default_factory=list)
    unsynced: list[str] = field(default_factory=list)
    slots: dict[str, range] = field(default_factory=dict)
    fatal: str | None = None


class EnginesLost(RuntimeError):
    """The run cannot go on: which engine was lost, why, and what to do."""
