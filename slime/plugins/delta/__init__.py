"""The delta transport: a weight sync sends only the bytes that changed (``--update-weight-mode
delta``).
"""

from slime.registry import register

LOADER = "slime.plugins.delta.loader.load"
"""The ``load_format`` of a tensor update that is a request to load a published delta. It is the
import path of the loader, because SGLang's server process imports it
(``--custom-weight-loader``)."""


def parts() -> None:
    """Register the transport under the mode that chooses it, and its rules."""
    register("rules", "delta", "slime.plugins.delta:rules.json")
    register(
        "weight mode",
        "delta",
        "slime.plugins.delta.config:DELTA",
        flags="slime.plugins.delta.config:DeltaConfig",
    )
