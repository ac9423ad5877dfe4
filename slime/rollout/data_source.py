"""The documented import path of the data sources. The code is in :mod:`slime.data.source`."""

from slime.data.source import RolloutDataSource, RolloutDataSourceWithBuffer, pop_first

__all__ = ["RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first"]
