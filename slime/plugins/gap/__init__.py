"""Why trainer and engine disagree about a recorded step (``slime gap``)."""

from slime.registry import register


def parts() -> None:
    """Register the command."""
    register("command", "gap", "slime.plugins.gap.command:add_gap")
