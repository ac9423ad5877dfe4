"""The documented import path of the data sources. The code is in :mod:`slime.data.source`."""

from __future__ import annotations

from abc import ABC, abstractmethod

from slime.data.sample import Group
from slime.data.source import RolloutDataSource, RolloutDataSourceWithBuffer, pop_first

__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first"]


class DataSource(ABC):
    """Base class of users' data sources (``--data-source-path``), which the run creates with its
    ``args``.
    """

    @abstractmethod
    def get_samples(self, num_samples: int) -> list[Group]:
        """Return ``num_samples`` groups of ``--n-samples-per-prompt`` samples each."""

    @abstractmethod
    def add_samples(self, samples: list[Group]) -> None:
        """Take groups back that were not trained."""

    @abstractmethod
    def save(self, rollout_id: int) -> None:
        """Save the state after a rollout."""

    @abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Restore the state after a rollout."""

    def __len__(self) -> int:
        """Number of prompts in an epoch; 0 if it is not known. Then ``--num-rollout`` has to be
        given.
        """
        return 0

    def __bool__(self) -> bool:
        return True  # Otherwise a source of unknown length would be false.
