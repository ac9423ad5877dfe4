"""Coming over from other frameworks: ``slime translate``, checkpoints of Megatron-LM, and names of older releases."""

from slime.registry import register


def parts() -> None:
    """Register the subcommand and the reader."""
    register("command", "translate", "slime.plugins.compat.command:add_translate")
    register("checkpoint", "megatron_lm", "slime.plugins.compat.megatron_lm:MegatronLmWeights")
