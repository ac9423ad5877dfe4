"""Training with the unmodified megatron-core from PyPI, without Transformer Engine and Apex."""

from slime.registry import register

_FAMILIES = {
    "dense": (
        "llama", "mistral", "qwen2", "qwen3", "glm4", "gemma3_text", "phi3", "olmo3", "granite", "seed_oss", "smollm3",
    ),
    "experts": ("qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "minimax_m2", "gpt_oss"),
    "delta_nets": ("qwen3_next", "qwen3_5"),
    "sparse": ("deepseek_v32", "glm_moe_dsa"),
}  # fmt: skip
"""The weight maps by their modules in ``maps``. A map has the name of its family in capitals."""


def parts() -> None:
    """Register the backend, what is checked of its runs, and the weight maps."""
    here = "slime.plugins.megatron"
    needs = ("megatron.core", "slime-rl[megatron]")
    register("backend", "megatron", f"{here}.start:MegatronBackend", package=needs)
    register("layout", "megatron", f"{here}.layout:layout_of")
    flags = f"{here}.options:MegatronHooks"
    register("options", "megatron", f"{here}.options:OPTIONS", flags=flags)
    register("rules", "megatron", f"{here}.rules:RULES")
    register("resolver", "megatron", f"{here}.flags:resolve")
    register("check", "megatron", f"{here}.flags:check_family")
    # Megatron-LM: its checkpoints, which FSDP reads too, and the flags of its checkout
    named = ("load", "ref_load", "opd_teacher_load")
    register("check", "megatron_lm", f"{here}.flags:check_megatron_lm", when=named)
    register("checkpoint folder", "megatron_lm", f"{here}.folders:folder_of")
    register("checkpoint", "megatron_lm", f"{here}.megatron_lm:open_megatron_lm")
    register("other flags", "megatron_lm", f"{here}.megatron_lm_flags:find")
    for module, families in _FAMILIES.items():
        for family in families:
            register("model family", family, f"{here}.maps.{module}:{family.upper()}")
