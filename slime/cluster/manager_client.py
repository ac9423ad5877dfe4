"""The rollout manager as the driver calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from slime.cluster.actors import ActorHandle, Ref
    from slime.cluster.ray_wait import Waiter
    from slime.cluster.rollout_manager import RolloutManager
    from slime.data.fields import Wire

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class RolloutBatch:
    """One generated rollout as the driver gets it; the samples themselves stay where the actors keep objects."""

    refs: list[Ref[Wire]]
    """The training data, one object per data-parallel rank; empty with ``--debug-rollout-only``."""
    metrics: dict[str, float] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    """A few samples to show."""
    warnings: list[str] = field(default_factory=list)
    """Warnings of the rollout manager's process since the last rollout."""


class ManagerClient:
    """Calls :class:`~slime.cluster.rollout_manager.RolloutManager`; every wait has a deadline.

    Args:
        handle: The handle of the manager's actor.
        timeout: Default deadline of a wait, in seconds (``--phase-timeout``).
    """

    def __init__(self, handle: ActorHandle, waiter: Waiter, timeout: float) -> None:
        self.handle, self.timeout = handle, timeout
        self._waiter = waiter

    def start(
        self, method: Callable[Concatenate[RolloutManager, P], T], *arguments: P.args, **keywords: P.kwargs
    ) -> Ref[T]:
        """Start a call, e.g. ``manager.start(RolloutManager.generate, 3)``, and return a reference to its result."""
        return getattr(self.handle, method.__name__).remote(*arguments, **keywords)

    def call(
        self, what: str, method: Callable[Concatenate[RolloutManager, P], T], *arguments: P.args, **keywords: P.kwargs
    ) -> T:
        """Start a call and wait for its result; ``what`` names the wait in an error."""
        return self.wait(self.start(method, *arguments, **keywords), what)

    def wait(
        self,
        ref: Ref[T],
        what: str,
        deadline: float | None = None,
        meanwhile: Callable[[], None] | None = None,
        flag: str = "--phase-timeout",
    ) -> T:
        """Wait for the result of a call that :meth:`start` began.

        See :meth:`Waiter.get <slime.cluster.ray_wait.Waiter.get>` for the arguments and errors.
        """
        named = {"rollout manager": self.handle}
        limit = deadline or self.timeout
        return self._waiter.get([ref], what, limit, actors=named, meanwhile=meanwhile, flag=flag)[0]
