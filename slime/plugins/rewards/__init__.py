"""Rewards beyond those of the core: sandboxed code, instructions (IFBench), and similarity by an encoder."""

from slime.registry import register


def parts() -> None:
    """Register the rewards of this plug-in."""
    register("reward", "ifbench", "slime.plugins.rewards.ifbench:IFBENCH")
    register("reward", "code", "slime.plugins.rewards.code:CODE")
