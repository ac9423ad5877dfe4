"""How many tokens prompt and response may have together."""

from __future__ import annotations

from typing import Any

from slime.config.hf_config import context_length, read_config

ENGINES_OWN = 8
"""Tokens of the context that SGLang keeps to itself: 7 in 0.5.23."""


def served_context(args: Any) -> int | None:
    """Tokens of the longest sequence that the engines take, prompt and response; None where it is not known.

    ``--sglang-context-length``, else what the model's config.json says; at most the tokens of the KV cache, where
    they are given.
    """
    given = getattr(args, "sglang", None) or {}
    embedded = getattr(args, "rollout_backend", None) == "embedded"
    config = read_config(args.hf_checkpoint) if getattr(args, "hf_checkpoint", None) else None
    limits = [
        (None if embedded else given.get("context_length")) or context_length(config or {}, scaled=not embedded),
        getattr(args, "embedded_max_total_tokens", None) if embedded else given.get("max_total_tokens"),
    ]
    return min((int(limit) for limit in limits if limit), default=None)


def context_limit(args: Any) -> int | None:
    """Tokens that prompt and response may have together: ``--rollout-max-context-len``, at most what the engines
    take."""
    served = served_context(args)
    limits = [getattr(args, "rollout_max_context_len", None), None if served is None else served - ENGINES_OWN]
    return min((int(limit) for limit in limits if limit is not None), default=None)


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
