"""Megatron's options: those of Megatron-LM, and the config fields of megatron-core; and the flags of
hooks that only its backend calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime.config.flag import Section, hook_flag
from slime.config.passthrough import ProgramOptions

OPTIONS = ProgramOptions((Path(__file__).with_name("options.json"),), has_prefix=False)


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
