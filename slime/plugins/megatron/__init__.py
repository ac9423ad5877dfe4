"""Training with the unmodified megatron-core from PyPI, without Transformer Engine and Apex."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime.config.flag import Section, hook_flag
from slime.config.passthrough import ProgramOptions
from slime.registry import register

OPTIONS = ProgramOptions((Path(__file__).with_name("options.json"),), has_prefix=False)
"""The options of Megatron-LM, and the config fields of megatron-core."""


@dataclass
class MegatronHooks(Section):
    _title = "hooks of the Megatron backend"

    custom_megatron_init_path: str | None = hook_flag()
    """Function fn(args) that is called after Megatron has created its process groups"""
    custom_megatron_before_log_prob_hook_path: str | None = hook_flag()
    """Function fn(args, model, prefix) that is called before log-probs are computed with Megatron;
    the prefix is "", "ref_" or "teacher_" for the actor, the reference and the teacher"""
    custom_megatron_before_train_step_hook_path: str | None = hook_flag()
    """Function fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler) that is called
    before each optimizer step of Megatron"""


_FAMILIES = {
    "dense": (
        "llama", "mistral", "qwen2", "qwen3", "glm4", "gemma3_text", "phi3", "olmo3", "granite", "seed_oss", "smollm3",
    ),
    "experts": (
        "qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "minimax_m2", "gpt_oss",
    ),
    "delta_nets": ("qwen3_next", "qwen3_5"),
}  # fmt: skip
"""The weight maps by their modules in ``maps``. A map has the name of its family in capitals."""


def parts() -> None:
    """Register the backend, what is checked of its runs, and the weight maps."""
    here = "slime.plugins.megatron"
    needs = ("megatron.core", "slime-rl[megatron]")
    register("backend", "megatron", f"{here}.start:MegatronBackend", package=needs)
    register("layout", "megatron", f"{here}.layout:layout_of")
    register("options", "megatron", OPTIONS, flags=MegatronHooks)
    register("rules", "megatron", f"{here}.flags:RULES")
    register("resolver", "megatron", f"{here}.flags:resolve")
    register("check", "megatron", f"{here}.flags:check_family")
    # Megatron-LM: its checkpoints, which FSDP reads too, and the flags of its checkout
    named = ("load", "ref_load", "opd_teacher_load")
    register("check", "megatron_lm", f"{here}.flags:check_megatron_lm", when=named)
    register("checkpoint folder", "megatron_lm", f"{here}.megatron_lm_found:folder_of")
    register("checkpoint", "megatron_lm", f"{here}.megatron_lm:open_megatron_lm")
    register("other flags", "megatron_lm", f"{here}.megatron_lm_found:find")
    for module, families in _FAMILIES.items():
        for family in families:
            register("model family", family, f"{here}.maps.{module}:{family.upper()}")
