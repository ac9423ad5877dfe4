"""A user's Megatron hooks, which note how they were called."""

from __future__ import annotations

from typing import Any

CALLS: list[tuple[str, Any]] = []


def init(args: Any) -> None:
    CALLS.append(("init", args.hf_checkpoint is not None))


def before_log_prob(args: Any, model: Any, prefix: str) -> None:
    CALLS.append(("log_prob", prefix))


def before_step(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any
) -> None:
    CALLS.append(("step", (rollout_id, step_id, len(model), scheduler.num_steps)))


def loss_with_metric_of_some(
    args: Any, batch: dict[str, Any], logits: Any, mean: Any
) -> tuple[Any, dict[str, Any]]:
    """A custom loss with a metric for the samples of group 0 only, which some micro-batches do not
    have.
    """
    loss = mean(-batch["current_log_probs"])
    return loss, {"of_group_0": loss.detach()} if 0 in batch["group_indices"] else {}
