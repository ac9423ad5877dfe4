"""Which samples a rank trains in an optimizer step, and how many it may leave out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MicroBatches = list[list[int]]


def of_step(batch: dict[str, Any], step: int) -> MicroBatches:
    """The rank's micro-batches of optimizer step ``step``: local sample positions.

    Raises:
        IndexError: the batch has fewer steps.
    """
    counts = batch["num_microbatches"]
    if not 0 <= step < len(counts):
        raise IndexError(f"step {step} of a batch with {len(counts)} optimizer steps")
    start = sum(counts[:step])
    return [list(indices) for indices in batch["micro_batch_indices"][start : start + counts[step]]]


def without_zero_advantages(batch: dict[str, Any], micro_batches: MicroBatches) -> MicroBatches:
    """Leave out samples whose advantages are all exactly 0 (where the mask is on), and micro-batches left empty."""
    advantages, masks = batch["advantages"], batch["loss_masks"]

    def moves_weights(i: int) -> bool:
        return bool((torch.as_tensor(advantages[i]) * torch.as_tensor(masks[i]) != 0).any())

    kept = [[i for i in indices if moves_weights(i)] for indices in micro_batches]
    return [indices for indices in kept if indices]


def weight(args: Any, batch: dict[str, Any], micro_batches: MicroBatches) -> float:
    """What these samples weigh in the step's mean, before the division by its rollouts or tokens."""
    total = 0.0
    for indices in micro_batches:
        for i in indices:
            tokens = float(torch.as_tensor(batch["loss_masks"][i]).sum())
            total += (
                tokens if args.calculate_per_token_loss else tokens / max(float(batch["rollout_mask_sums"][i]), 1.0)
            )
    return total


def scatter_to_samples(
    flat: Tensor,
    lengths: list[int],
    indices: list[int],
    out: list[Tensor | None],
    response_index: list[Tensor] | None = None,
) -> None:
    """Put per-token values of one micro-batch, ``[R]``, in their samples' places, on the CPU.

    ``response_index``: places within each sample's tensor, which is there already (context parallelism).
    """
    parts = flat.float().cpu().split(lengths)
    for order, (i, part) in enumerate(zip(indices, parts, strict=True)):
        whole = out[i]
        if response_index is None or whole is None:
            out[i] = part.clone()
        else:
            whole[response_index[order]] = part
