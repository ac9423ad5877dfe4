"""The delta transport: a weight sync sends only the bytes that changed (``--update-weight-mode delta``)."""

from slime.registry import register


def parts() -> None:
    """Register the transport. Its name is not a value of ``--update-weight-transport``: the mode chooses it."""
    register("transport", "delta", "slime.plugins.delta.transport:DELTA")
