"""The classes of slime's own estimators by their names in ``--advantage-estimator``."""

from __future__ import annotations

from slime.algorithms import Algorithm
from slime.registry import find, parts

ALGORITHMS: dict[str, type[Algorithm]] = {
    name: find("algorithm", name) for name in parts("algorithm")
}
