"""Rewards beyond those of the core: choices, sandboxed code, instructions (IFBench), encoders and
servers.
"""

from slime.registry import register


def parts() -> None:
    """Register the rewards of this plug-in."""
    register("reward", "ifbench", "slime.plugins.rewards.ifbench:IFBENCH")
    register("reward", "code", "slime.plugins.rewards.code:CODE")
    register("reward", "gpqa", "slime.plugins.rewards.gpqa:GPQA")
    register("reward", "remote_rm", "slime.plugins.rewards.remote_rm:REMOTE_RM")
