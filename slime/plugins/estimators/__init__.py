"""Estimators and losses of 2025 and 2026 beyond those of the core."""

from slime.registry import register


def parts() -> None:
    """Register the estimators of this plug-in."""
    register("algorithm", "maxrl", "slime.plugins.estimators.maxrl:MaxRl")
