"""The rollout manager as the driver calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ray import ObjectRef

    from slime.cluster.ray_wait import Waiter


class RemoteMethod(Protocol):
    """A method of a Ray actor."""

    def remote(self, *arguments: Any) -> ObjectRef[Any]:
        """Start the call and return a reference to its result at once."""


class ActorHandle(Protocol):
    """A Ray actor of any class.

    Ray's own ``ActorHandle`` declares every method as ``Never``, so mypy would not check the code after a call.
    """

    def __getattr__(self, name: str) -> RemoteMethod: ...


@dataclass(frozen=True)
class RolloutBatch:
    """One generated rollout as the driver gets it; the samples themselves stay in Ray's object store."""

    refs: list[ObjectRef[Any]]
    """The training data, one object per data-parallel rank; empty with ``--debug-rollout-only``."""
    metrics: dict[str, float] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    """A few samples to show."""
    warnings: list[str] = field(default_factory=list)
    """Warnings of the rollout manager's process since the last rollout."""


class ManagerClient:
    """Calls of :class:`~slime.cluster.rollout_manager.RolloutManager`, each waited for with a deadline.

    Args:
        handle: of the manager's actor.
        timeout: default deadline of a wait, in seconds (``--phase-timeout``).
    """

    def __init__(self, handle: ActorHandle, waiter: Waiter, timeout: float) -> None:
        self.handle, self.timeout = handle, timeout
        self._waiter = waiter

    def wait(
        self,
        ref: ObjectRef[Any],
        what: str,
        deadline: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Any:
        """The result of one call, e.g. ``manager.wait(manager.handle.offload.remote(), "the engines to offload")``.

        See :meth:`Waiter.get <slime.cluster.ray_wait.Waiter.get>` for the arguments and errors.
        """
        named = {"rollout manager": self.handle}
        return self._waiter.get([ref], what, deadline or self.timeout, actors=named, meanwhile=meanwhile)[0]
