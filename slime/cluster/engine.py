"""One engine of a run: where its server process runs, and which state it is in."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypedDict

from slime.engines.launch import EngineSpec
from slime.engines.router import Worker

if TYPE_CHECKING:
    from slime.cluster.engine_actor import EngineHost

State = Literal["starting", "unsynced", "serving", "lost", "given up"]
GONE: tuple[State, ...] = ("lost", "given up")
"""States of engines whose server process was killed, together with the actor that could report on it."""


class ServerFacts(TypedDict):
    """What the host of an engine reports about its server process; ``fate`` as in ``ServerProcess``."""

    url: str
    pid: int
    alive: bool
    fate: str
    bootstrap_port: int | None


@dataclass
class Engine:
    """One engine position in the run; a restarted engine keeps it.

    Attributes:
        host: None for an external server, which this run does not start.
        losses: When the engine was lost (``time.monotonic()``).
        ready_at: When its last start was complete (``time.monotonic()``).
        ending: Whether it is lost and its processes are still being ended.
        last_words: The end of its log after a loss, or the reason for the loss.
    """

    spec: EngineSpec
    host: EngineHost | None
    url: str = ""
    bootstrap_port: int | None = None
    state: State = "starting"
    losses: list[float] = field(default_factory=list)
    ready_at: float = 0.0
    ending: bool = False
    last_words: str = ""

    @property
    def index(self) -> int:
        return self.spec.index

    @property
    def external(self) -> bool:
        return self.host is None

    @property
    def worker(self) -> Worker:
        return Worker(self.url, self.spec.model, self.spec.worker_type, self.bootstrap_port, self.index)

    def wait_ready(self) -> None:
        """Block until the engine answers. Its address changes with every start."""
        assert self.host is not None
        self.url = self.host.wait_ready()
        self.ready_at = time.monotonic()
        if self.spec.worker_type == "prefill":
            self.bootstrap_port = self.host.describe()["bootstrap_port"]


@dataclass(frozen=True)
class EngineStatus:
    """The engines that get the trainer's weights, as reported to the driver.

    Attributes:
        serving: URLs of the engines that hold the current weights and get requests.
        unsynced: URLs of the engines that were restarted and wait for weights.
        slots: By engine URL, the GPU slots that it occupies, among those of the rollout.
        fatal: Why the run must end, or None.
    """

    serving: list[str] = field(default_factory=list)
    unsynced: list[str] = field(default_factory=list)
    slots: dict[str, range] = field(default_factory=dict)
    fatal: str | None = None


class EnginesLost(RuntimeError):
    """The run cannot continue; the message says which engine was lost, why, and what to do."""
