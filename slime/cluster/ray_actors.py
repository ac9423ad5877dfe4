"""Create and end Ray actors, and types for them.

Ray's own ``ActorHandle`` declares the type of every method as ``Never``, so mypy would not check the code after a call.
"""

from __future__ import annotations

from collections.abc import Callable
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
