"""Coming over from other frameworks: ``slime translate``, checkpoints of Megatron-LM, and names of older releases."""

from slime.registry import register


def parts() -> None:
    """Register the parts."""
    register("command", "translate", "slime.plugins.compat.command:add_translate")
    register("checkpoint", "megatron_lm", "slime.plugins.compat.megatron.checkpoints:open_megatron_lm")
    register(
        "check",
        "megatron_lm",
        "slime.plugins.compat.megatron.check:check_megatron_lm",
        when=("load", "ref_load", "opd_teacher_load"),
    )
