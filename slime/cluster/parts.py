"""What of a run exists so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.cluster.manager_client import ActorHandle, ManagerClient
    from slime.cluster.phases import Run
    from slime.cluster.placement import Placement
    from slime.cluster.snapshots import StartingPoint
    from slime.cluster.step_log import StepLog
    from slime.cluster.stop_signals import StopSignals
    from slime.cluster.train_group import TrainGroup
    from slime.observability.run_dir import RunDir


@dataclass
class Parts:
    """Filled in by :func:`slime.cluster.start.start`, so that a failure at any point of it ends exactly what exists.

    Attributes:
        engines_started: the manager has engines, which its report can name.
        run: once the start is complete.
    """

    dir: RunDir
    begin: StartingPoint
    log: StepLog
    stop: StopSignals
    placement: Placement | None = None
    manager: ManagerClient | None = None
    engines_started: bool = False
    groups: list[TrainGroup] = field(default_factory=list)
    run: Run | None = None

    def actors(self) -> dict[str, ActorHandle]:
        """The Ray actors that hold the run's state, by what an error calls them."""
        named = {"the rollout manager": self.manager.handle} if self.manager is not None else {}
        for group in self.groups:
            named |= {f"the {group.role}'s rank {number}": rank for number, rank in enumerate(group.ranks)}
        return named
