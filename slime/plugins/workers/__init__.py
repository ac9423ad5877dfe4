"""Rollout workers: processes that generate and score groups beside the rollout manager
(``--rollout-workers``).
"""

from slime.registry import register


def parts() -> None:
    """Register what starts the workers."""
    register("generator", "workers", "slime.plugins.workers.workers:start")
