"""The rewards of ``--rm-type``: math, choices, texts, sandboxed code, instructions (IFBench), encoders
and servers.
"""

from slime.registry import register


def parts() -> None:
    """Register the rewards of this plug-in."""
    register("reward", "deepscaler", "slime.plugins.rewards.math:DEEPSCALER")
    register("reward", "dapo", "slime.plugins.rewards.math:DAPO")
    register("reward", "math", "slime.plugins.rewards.math:MATH")
    register("reward", "f1", "slime.plugins.rewards.simple:F1")
    register("reward", "last_number", "slime.plugins.rewards.simple:LAST_NUMBER")
    register("reward", "random", "slime.plugins.rewards.simple:RANDOM")
    register("reward", "ifbench", "slime.plugins.rewards.ifbench_checks:IFBENCH")
    register("reward", "gpqa", "slime.plugins.rewards.gpqa:GPQA")
    register("reward", "remote_rm", "slime.plugins.rewards.servers:REMOTE_RM")
    register("reward", "model", "slime.plugins.rewards.encoder:MODEL")
    register("reward", "rubric", "slime.plugins.rewards.rubric:RUBRIC")
    config = "slime.plugins.rewards.config"
    register("reward", "code", "slime.plugins.rewards.code:CODE", flags=f"{config}:CodeFlags")
    register("resolver", "rubric", f"{config}:resolve", flags=f"{config}:RubricFlags")
