"""The one door to actors: how an actor is made, called, waited for and ended.

An actor is an object that other parts of the run call without waiting; a call returns a reference
to its result. There are two implementations. With Ray (:mod:`slime.plugins.actors.ray_actors`), each actor
is a process, on any node of a cluster. Inline (:mod:`slime.plugins.actors.inline_actors`), actors
are objects and threads of this process. Nothing else in slime may tell them apart: all other files
use :func:`door`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from slime import registry

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

OWN_THREADS = ("status", "try_folder")
"""Methods that answer while a step runs or a model is loaded, each on a thread of its own. They do
not share a thread: if the file system hangs in ``try_folder``, ``status`` must still answer, or the
rank would look frozen."""


class Ref(Protocol[T_co]):
    """The result of a call, which may not be there yet; or an object that was stored with
    :meth:`Actors.put`.
    """

    def future(self) -> Future[Any]:
        """The result for an event loop. Errors come from it as the implementation raises them."""


class RemoteMethod(Protocol):
    """A method of an actor."""

    def remote(self, *arguments: object, **keywords: object) -> Ref[Any]:
        """Start the call and return a reference to its result at once."""


class ActorHandle(Protocol):
    """An actor of any class. Ray types the methods of its own handles as ``Never``, which would end
    mypy's checks.
    """

    def __getattr__(self, name: str) -> RemoteMethod: ...


class ClusterError(RuntimeError):
    """The cluster cannot provide what the flags ask for; the message says what to change."""


class ActorError(RuntimeError):
    """A call has no result, for a reason outside of the method that was called."""


class ActorLost(ActorError):
    """The actor has ended, or the object was lost with the node that held it."""

    @property
    def at_creation(self) -> bool:
        """Whether the constructor of the actor failed, which would fail again after a restart."""
        return "creation task" in str(self)


class NoAnswer(ActorError, TimeoutError):
    """There was no result in time."""


class NotEnded(RuntimeError):
    """Processes are still there after they were killed."""


@dataclass(frozen=True)
class ActorProcess:
    """The process of an actor; ``started`` is its creation time, since process ids are used
    again.
    """

    node: str
    pid: int
    started: float


@dataclass(frozen=True, order=True)
class Place:
    """One bundle of a reservation with the GPU that it has; sorted by node, then GPU.

    Attributes:
        node: The numbers of the node's address.
    """

    node: tuple[int, ...]
    gpu: int
    bundle: int
    address: str


class Bundles(Protocol):
    """Resources that are reserved for actors, divided into bundles."""

    def wait(self, seconds: float) -> bool:
        """Wait until all bundles are there; False after ``seconds``."""

    def places(self, count: int, seconds: float) -> list[Place]:
        """The places of the first ``count`` bundles, each of which must hold a GPU."""

    def options(self, index: int, gpus: float, cpus: float) -> Mapping[str, Any]:
        """The ``options`` of :meth:`Actors.create` for an actor in a bundle."""

    def remove(self) -> None:
        """Give the resources back."""


class Actors(Protocol):
    """Makes actors, and waits for their results."""

    # --- the cluster ---------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether actors can be made."""

    def connect(self) -> None:
        """Join a cluster, or start a private one."""

    def disconnect(self) -> None:
        """End what :meth:`connect` has started, with all actors."""

    def resources(self) -> Mapping[str, float]:
        """The numbers of ``CPU`` and ``GPU`` of all nodes."""

    def report(self) -> str:
        """One line for error messages: nodes, and free and total resources."""

    def nodes(self) -> int:
        """The number of nodes that are alive."""

    def node(self) -> str:
        """The identity of the node of this process."""

    def own_process(self) -> ActorProcess:
        """This process, which must be that of an actor."""
        import psutil

        return ActorProcess(self.node(), os.getpid(), psutil.Process().create_time())

    def address(self) -> str:
        """The address by which processes on other nodes reach this one; loopback in a private
        cluster.
        """

    def log_to(self, folder: Path, name: str) -> None:
        """Send the output of the actor that calls this to a file of ``folder``."""

    def own_gpus(self) -> Sequence[int]:
        """The GPUs of the actor that calls this."""

    def reserve(self, bundle: Mapping[str, float], count: int, spread: bool) -> Bundles:
        """Reserve ``count`` equal bundles, on as few nodes as possible or, with ``spread``, on as
        many.
        """

    # --- actors and their results --------------------------------------------------------------

    def create(
        self,
        cls: type,
        *arguments: object,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        threads: int | None = None,
        own_threads: bool = False,
        spread: bool = False,
    ) -> ActorHandle:
        """Make an actor of ``cls`` and return at once.

        Args:
            arguments: Of the constructor.
            options: Where the actor runs, see :meth:`Bundles.options`; None: anywhere, without
                resources.
            environment: Environment variables of its process.
            threads: The number of calls that may run at the same time; by default one after the
                other.
            own_threads: Whether the methods in :data:`OWN_THREADS` run beside all others.
            spread: Whether actors of this kind should be on different nodes.
        """

    def kill(self, actor: ActorHandle) -> None:
        """End an actor at once."""

    def end_processes(self, processes: Sequence[ActorProcess], seconds: float) -> None:
        """Kill processes of actors on any node with SIGKILL, and wait until they have ended.

        :meth:`kill` asks the process itself to exit, which one that is stopped or hangs in the
        kernel does not do.

        Raises:
            NotEnded: Some still run after ``seconds``.
            ActorError: A node does not answer.
        """

    def put(self, value: T) -> Ref[T]:
        """Store an object, so that other actors can take it without a detour through the caller."""

    def get(self, refs: Sequence[Ref[T]], timeout: float | None = None) -> list[T]:
        """Wait for results, and return them in order.

        Raises:
            ActorLost, NoAnswer, ActorError: There is no result; see these.
            Exception: What a method has raised.
        """

    def wait(self, refs: Sequence[Ref[T]], timeout: float) -> tuple[list[Ref[T]], list[Ref[T]]]:
        """Wait until all results are there, but at most ``timeout`` seconds; returns those that are
        and are not.
        """

    async def result(self, ref: Ref[T]) -> T:
        """Wait for one result on an event loop; raises what :meth:`get` does."""


# What engines, rollout workers and training ranks have in common: each is started again after a
# loss, a few times.


@dataclass(kw_only=True)
class Supervised:
    """A part of a run that is started again when it was lost; a restarted part is the same object.

    Attributes:
        most_losses: Losses within ``losses_seconds`` after which another start would not help.
        losses: When it was lost (``time.monotonic()``).
        last_words: The reason for the last loss, or the end of the log.
    """

    most_losses: int = 5
    losses_seconds: float = 600.0
    losses: list[float] = field(default_factory=list)
    last_words: str = ""

    def note_loss(self, why: str) -> None:
        """Count a loss, or a start that failed."""
        self.losses.append(time.monotonic())
        self.last_words = why

    @property
    def hopeless(self) -> bool:
        """Whether it was lost so often that it is not worth another start."""
        recent = [at for at in self.losses if at > time.monotonic() - self.losses_seconds]
        return len(recent) >= self.most_losses

    @property
    def how_often(self) -> str:
        """The limit that a hopeless part has reached, for a message."""
        return f"{self.most_losses} times within {self.losses_seconds:.0f} s"


_current: Actors | None = None


def door() -> Actors:
    """The implementation that this process uses: Ray's, unless :func:`use` has chosen another."""
    global _current
    if _current is None:
        _current = registry.find("actors", "ray")()
    return _current


def use(actors: Actors | None) -> None:
    """Let :func:`door` return ``actors`` from now on; None stands for Ray's."""
    global _current
    _current = actors
