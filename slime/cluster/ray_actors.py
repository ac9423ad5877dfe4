"""Create and end Ray actors, and types for them.

Ray's own ``ActorHandle`` declares the type of every method as ``Never``, so mypy would not check the code after a call.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ray import ObjectRef


class RemoteMethod(Protocol):
    """A method of a Ray actor."""

    def remote(self, *arguments: object, **keywords: object) -> ObjectRef[Any]:
        """Start the call and return a reference to its result at once."""


class ActorHandle(Protocol):
    """A Ray actor of any class."""

    def __getattr__(self, name: str) -> RemoteMethod: ...


class ActorClass(Protocol):
    """The result of applying ``ray.remote`` to a class."""

    def options(self, **options: object) -> ActorClass:
        """Return the same class with the given resources, environment and threads for its actors."""

    def remote(self, *arguments: object) -> ActorHandle:
        """Start an actor."""


OWN_THREADS = ("status", "try_folder")
"""Methods that answer while a step runs or a model is loaded, each on a thread of its own. They do not share a thread:
if the file system hangs in ``try_folder``, ``status`` must still answer, or the rank would look frozen."""


def actor_class(cls: type) -> ActorClass:
    """The Ray actor class of ``cls``."""
    import ray

    return ray.remote(cls)  # type: ignore[return-value]  # Ray types the methods of its handles as Never


def actor_class_with_own_threads(cls: type) -> ActorClass:
    """The Ray actor class of ``cls``, with a concurrency group of one thread for each of :data:`OWN_THREADS`."""
    import ray

    names = [name for name in OWN_THREADS if hasattr(cls, name)]
    aside = {name: ray.method(concurrency_group=name)(getattr(cls, name)) for name in names}
    make: Callable[[type], ActorClass] = ray.remote(concurrency_groups=dict.fromkeys(names, 1))  # type: ignore[call-overload]
    return make(type(cls.__name__, (cls,), aside))


def kill(actor: ActorHandle) -> None:
    """End an actor's process at once."""
    import ray

    ray.kill(actor)  # type: ignore[arg-type]  # it is one of Ray's handles


@dataclass(frozen=True)
class ActorProcess:
    """The process of an actor; ``started`` is its creation time, since process ids are used again."""

    node: str
    pid: int
    started: float

    @classmethod
    def own(cls) -> ActorProcess:
        """This process, which must be that of a Ray worker."""
        import psutil
        import ray

        return cls(ray.get_runtime_context().get_node_id(), os.getpid(), psutil.Process().create_time())


class NotEnded(RuntimeError):
    """Processes are still there after they were killed."""


def end_processes(processes: Sequence[ActorProcess], seconds: float) -> None:
    """Kill processes of actors on any node with SIGKILL, and wait until they have ended.

    :func:`kill` asks the process itself to exit, which one that is stopped or hangs in the kernel does not do.

    Raises:
        NotEnded: Some still run after ``seconds``.
        RayError: A node does not answer.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here, left = ray.get_runtime_context().get_node_id(), []
    for node in dict.fromkeys(process.node for process in processes):
        there = [process for process in processes if process.node == node]
        if node == here:
            left += _end_here(there, seconds)
        else:
            strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            ending = ray.remote(_end_here).options(num_cpus=0, scheduling_strategy=strategy)
            left += list(ray.get([ending.remote(there, seconds)], timeout=2 * seconds)[0])
    if left:
        raise NotEnded(f"processes {', '.join(map(str, left))} do not end after SIGKILL")


def _end_here(processes: Sequence[ActorProcess], seconds: float) -> list[int]:
    """Kill processes of this node with their children; returns the ids of those that still run after ``seconds``."""
    import psutil

    from slime.engines.process import wait_gone

    killed: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(process.pid)
            if abs(found.create_time() - process.started) < 0.1:
                killed += [*found.children(recursive=True), found]
    for each in killed:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    return [each.pid for each in wait_gone(killed, seconds)]
