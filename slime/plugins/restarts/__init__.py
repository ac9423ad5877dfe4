"""What follows a loss: new training ranks while the engines stay, or a new driver
(``--max-restarts``).
"""

from slime.registry import register


def parts() -> None:
    """Register the :class:`slime.cluster.run.Recovery` of a run."""
    register("recovery", "restarts", "slime.plugins.restarts.recovery:Restarts")
