"""Coming over from other frameworks: ``slime translate``."""

from slime.registry import register


def parts() -> None:
    """Register the subcommand."""
    register("command", "translate", "slime.plugins.compat.command:add_translate")
