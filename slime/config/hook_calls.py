"""How the run calls each of the user's functions: enough to find one that would fail when it is first called."""

from __future__ import annotations

import inspect
from typing import Any

CALLS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "data_source_path": ("fn(args)", 1, ()),
    "rollout_function_path": ("fn(args, rollout_id, data_source, evaluation=…)", 3, ("evaluation",)),
    "eval_function_path": ("fn(args, rollout_id, data_source, evaluation=…)", 3, ("evaluation",)),
    "agent_function_path": ("fn(task)", 1, ()),
    "buffer_filter_path": ("fn(args, rollout_id, buffer, num_samples)", 4, ()),
    "rollout_sample_filter_path": ("fn(args, samples)", 2, ()),
    "rollout_all_samples_process_path": ("fn(args, all_samples, data_source)", 3, ()),
    "rollout_data_postprocess_path": ("fn(args, rollout_id, rollout_data)", 3, ()),
    "custom_rollout_log_function_path": ("fn(rollout_id, args, samples, metrics, seconds)", 5, ()),
    "custom_eval_rollout_log_function_path": ("fn(rollout_id, args, data, metrics)", 4, ()),
    "custom_convert_samples_to_train_data_path": ("fn(args, samples)", 2, ()),
    "custom_reward_post_process_path": ("fn(args, samples)", 2, ()),
    "custom_advantage_function_path": ("fn(args, rollout_data)", 2, ()),
    "custom_loss_function_path": ("fn(args, batch, logits, sum_of_sample_mean)", 4, ()),
    "custom_model_provider_path": ("fn(pre_process=…, post_process=…)", 0, ("pre_process", "post_process")),
    "custom_megatron_init_path": ("fn(args)", 1, ()),
    "custom_megatron_before_log_prob_hook_path": ("fn(args, model, store_prefix)", 3, ()),
    "custom_megatron_before_train_step_hook_path": (
        "fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)",
        6,
        (),
    ),
    "custom_update_weight_post_write_path": ("fn(args, version_dir, rollout_engines)", 3, ()),
}
"""By the flag's attribute: the call in words, its positional arguments, and its keywords. Functions that are called in
several ways (generation, rewards, filters) are left to ``slime check-hooks``."""


def call_problem(name: str, function: Any) -> str | None:
    """Why a function cannot be called as the flag ``name`` is; None where it can, or where that is not known."""
    if not callable(function):
        return f"it is a {type(function).__name__}, not a function"
    if name not in CALLS:
        return None
    words, positional, keywords = CALLS[name]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some built-ins
        return None
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        called = getattr(function, "__name__", type(function).__name__)
        return f"it is called as {words}, but is defined as {called}{signature}: {error}"
    return None
