"""What the parts of a run are: processes of a Ray cluster, or threads of one process
(``--inline``).
"""

from slime.registry import register


def parts() -> None:
    """Register both implementations of :class:`slime.cluster.actors.Actors`."""
    register("actors", "ray", "slime.plugins.actors.ray_actors:RayActors")
    register("actors", "inline", "slime.plugins.actors.inline_actors:InlineActors")
