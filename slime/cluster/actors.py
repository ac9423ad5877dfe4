"""The one door to actors: how an actor is made, called, waited for and ended.

An actor is an object that other parts of the run call without waiting; a call returns a reference to its result. There
are two implementations. With Ray (:mod:`slime.cluster.ray_actors`), each actor is a process, on any node of a cluster.
Inline (:mod:`slime.cluster.inline_actors`), actors are objects and threads of this process. Nothing else in slime may
tell them apart: all other files use :func:`door`.
"""

from __future__ import annotations

from slime.cluster.actor_types import (
    ActorError,
    ActorHandle,
    ActorLost,
    ActorProcess,
    Actors,
    Bundles,
    ClusterError,
    NoAnswer,
    NotEnded,
    Place,
    Ref,
)

__all__ = [
    "ActorError",
    "ActorHandle",
    "ActorLost",
    "ActorProcess",
    "Actors",
    "Bundles",
    "ClusterError",
    "NoAnswer",
    "NotEnded",
    "Place",
    "Ref",
    "door",
    "use",
]

_current: Actors | None = None


def door() -> Actors:
    """The implementation that this process uses: Ray's, unless :func:`use` has chosen another."""
    global _current
    if _current is None:
        from slime.cluster.ray_actors import RayActors

        _current = RayActors()
    return _current


def use(actors: Actors | None) -> None:
    """Let :func:`door` return ``actors`` from now on; None stands for Ray's."""
    global _current
    _current = actors
