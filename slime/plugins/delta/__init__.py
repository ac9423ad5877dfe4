"""The delta transport: a weight sync sends only the bytes that changed (``--update-weight-mode
delta``).
"""

from slime.registry import register


def parts() -> None:
    """Register the transport under the mode that chooses it."""
    register(
        "weight mode",
        "delta",
        "slime.plugins.delta.transport:DELTA",
        flags="slime.plugins.delta.config:DeltaConfig",
    )
