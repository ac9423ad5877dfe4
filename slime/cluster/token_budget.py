"""The default of ``--max-tokens-per-gpu`` on GPUs: it is measured after the models are built, and a resume keeps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from slime.backends.token_budget import MOST_TOKENS, Measurement, budget
from slime.cluster.rollout_manager import RolloutManager
from slime.config.hf_config import read_config
from slime.config.rollout import longest_per_gpu

if TYPE_CHECKING:
    from slime.checkpoint.manifest import Manifest
    from slime.cluster.manager_client import ManagerClient
    from slime.cluster.trainer import Trainer
    from slime.config.args import Args

SHARE = 0.85
"""Fraction of the trainer's available memory that the largest micro-batch may fill; the rest is for fragmentation."""
SHARE_WITH_EXPERTS = 0.7
"""The same with experts: tokens choose their experts, so some ranks get more tokens than in the measurement."""


def settle_token_budget(
    args: Args,
    trainer: Trainer,
    manager: ManagerClient,
    on_gpu: bool,
    manifest: Manifest | None,
    note: Callable[[str], None],
) -> Args:
    """Find the token budget and pass it to all processes that pack samples into micro-batches.

    Does nothing if the flag is given, or without a GPU.

    Args:
        manifest: The manifest of the snapshot from which the run resumes. With the same number of GPUs, the run packs
            as it did before.
        note: Called with one line that explains the result.

    Returns:
        ``args`` with the budget.
    """
    if not args.use_dynamic_batch_size or "max_tokens_per_gpu" in args.explicit:
        return args
    if trainer.actor is None or not on_gpu:
        return args
    if args.deterministic or args.train_dtype == "float32":
        # Two deterministic runs must pack alike, even if one finds less free memory. In float32 there is no varlen
        # kernel on GPUs, so memory grows with the square of a sample's length, which the measurement does not cover.
        return args
    same_ranks = manifest is not None and manifest.get("world_size") == len(trainer.actor.ranks)
    tokens = manifest.get("settings", {}).get("max_tokens_per_gpu") if manifest is not None and same_ranks else None
    if isinstance(tokens, int) and tokens:
        note(f"--max-tokens-per-gpu {tokens}: as in the snapshot")
    else:
        share, longest = memory_share(str(args.hf_checkpoint)), longest_per_gpu(args)
        found: list[Measurement] = []
        for group in reversed(trainer.groups):  # the actor last, so that it is awake afterwards
            trainer.take_turn(group)
            found += group.measure_memory(share)
        tokens = budget(found, longest)
        note(explanation(tokens, longest, found))
    given = args.log_probs_max_tokens_per_gpu if "log_probs_max_tokens_per_gpu" in args.explicit else None
    forward_only = given or tokens
    for group in trainer.groups:
        group.set_token_budgets(tokens, forward_only)
    what = "the rollout manager to take the token budget"
    manager.call(what, RolloutManager.set_token_budgets, tokens, forward_only)
    return args.with_values(max_tokens_per_gpu=tokens, log_probs_max_tokens_per_gpu=forward_only)


def memory_share(checkpoint: str) -> float:
    config = read_config(checkpoint) or {}
    text = config.get("text_config") or config
    experts = any(text.get(key) for key in ("num_experts", "n_routed_experts", "num_local_experts"))
    return SHARE_WITH_EXPERTS if experts else SHARE


def explanation(tokens: int, longest: int, found: list[Measurement]) -> str:
    """One line that says what was measured. ``longest`` is the most tokens per GPU that the flags allow a sample."""
    least = min(found, key=lambda one: one.tokens)
    said = (
        f"--max-tokens-per-gpu {tokens}: a token takes {least.bytes_per_token / 2**10:.0f} KiB in training, and the "
        f"tightest of {len(found)} rank(s) has {least.bytes_for_tokens / 2**30:.1f} GiB for them"
    )
    if least.tokens > tokens and tokens >= MOST_TOKENS:
        said += " (more would not train faster)"
    if tokens < longest:
        said += (
            f"; warning: the flags allow samples of {longest} tokens per GPU, which may not fit: lower "
            "--rollout-max-response-len, or use --gradient-checkpointing or --context-parallel-size"
        )
    return said
