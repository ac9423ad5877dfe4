"""``slime serve``: a server of the Tinker API, for programs that own their training loop."""

from slime.registry import register


def parts() -> None:
    """Register the command."""
    register("command", "serve", "slime.plugins.serve.command:add_serve")
