"""How many tokens prompt and response may have together."""

from __future__ import annotations

import math
from typing import Any

from slime.config.hf_config import context_length, read_config
from slime.config.server_groups import ServerGroupError, read_server_groups

ENGINES_OWN = 8
"""Tokens of the context that SGLang keeps to itself: 7 in 0.5.23."""


def served_context(args: Any) -> int | None:
    """Tokens of the longest sequence that the engines take, prompt and response; None where it is not known.

    ``--sglang-context-length``, else what the model's config.json says; at most the tokens of the KV cache, where
    they are given. With ``--sglang-config`` the least of the groups of its first model, whose router takes the
    requests of a rollout; a group's overrides win over the flags.
    """
    path = getattr(args, "hf_checkpoint", None)
    if getattr(args, "rollout_backend", None) == "embedded":
        limits = [_of_model(path, scaled=False), getattr(args, "embedded_max_total_tokens", None)]
    else:
        given = getattr(args, "sglang", None) or {}
        path, overrides = _first_model(args, path)
        limits = []
        for options in ({**given, **group} for group in overrides):
            limits += [options.get("context_length") or _of_model(path), options.get("max_total_tokens")]
    return min((int(limit) for limit in limits if limit), default=None)


def _of_model(path: str | None, scaled: bool = True) -> int | None:
    return context_length((read_config(path) if path else None) or {}, scaled)


def _first_model(args: Any, path: str | None) -> tuple[str | None, list[dict[str, Any]]]:
    """Checkpoint and overrides of each server group of the first model of ``--sglang-config``; without a usable file,
    which the checks of the flags report, one group without overrides."""
    file = getattr(args, "sglang_config", None)
    if not file:
        return path, [{}]
    try:
        model = read_server_groups(file, str(path), getattr(args, "rollout_num_gpus_per_engine", None) or 1)[0]
    except (ServerGroupError, OSError):
        return path, [{}]
    return model.model_path, [group.overrides for group in model.groups if group.worker_type != "placeholder"]


def context_limit(args: Any) -> int | None:
    """Tokens that prompt and response may have together: ``--rollout-max-context-len``, at most what the engines
    take."""
    served = served_context(args)
    limits = [getattr(args, "rollout_max_context_len", None), None if served is None else served - ENGINES_OWN]
    return min((int(limit) for limit in limits if limit is not None), default=None)


def longest_per_gpu(args: Any) -> int:
    """Tokens of the longest sample that the flags allow, on each GPU that shares it (context parallelism)."""
    longest: int = args.rollout_max_response_len + (args.rollout_max_prompt_len or 0)
    if (limit := context_limit(args)) is not None:
        longest = min(longest, limit)
    return math.ceil(longest / max(int(args.megatron.get("context_parallel_size") or 1), 1))


def context_notice(args: Any) -> str | None:
    """What to know where the longest prompt and the longest response together are more than the engines take."""
    limit, response = context_limit(args), args.rollout_max_response_len
    if limit is None or response is None or response + (args.rollout_max_prompt_len or 1) <= limit:
        return None
    given = args.rollout_max_context_len is not None and args.rollout_max_context_len <= limit
    return (
        f"prompt and response may have {limit} tokens together "
        f"({'--rollout-max-context-len' if given else 'what the engines take of this model'}): answers are cut there "
        f"before --rollout-max-response-len {response}, and prompts that leave no room are left out and counted"
    )
