"""Which samples a rank trains in an optimizer step, and how many it may leave out."""

from __future__ import annotations

import torch
from torch import Tensor

from slime.data.convert import shared_prompts
from slime.data.fields import RankBatch
from slime.data.schedule import PackingSettings, pack_forward_only

MicroBatches = list[list[int]]


def of_step(batch: RankBatch, step: int) -> MicroBatches:
    """The rank's micro-batches of optimizer step ``step``: local sample positions.

    Raises:
        IndexError: the batch has fewer steps.
    """
    counts = batch["num_microbatches"]
    if not 0 <= step < len(counts):
        raise IndexError(f"step {step} of a batch with {len(counts)} optimizer steps")
    start = sum(counts[:step])
    return [list(indices) for indices in batch["micro_batch_indices"][start : start + counts[step]]]


def forward_only(
    settings: PackingSettings, batch: RankBatch, context_size: int, at_least: int = 1
) -> MicroBatches | None:
    """Packs of at most ``--log-probs-max-tokens-per-gpu`` tokens for passes without a backward.

    None where such passes use the micro-batches of training: the flag is not given or names training's own budget, or
    batches are padded, so that tokens do not say what fits.

    Args:
        context_size: ranks that share the tokens of each sample.
        at_least: number of packs, where there are as many samples.
    """
    budget = settings.forward_max_tokens
    if budget is None or budget == settings.max_tokens or settings.pads:
        return None
    lengths = [int(n) for n in batch["total_lengths"]]
    prompts = shared_prompts(settings, batch, context_size)
    return pack_forward_only(settings, lengths, prompts, budget * context_size, at_least)


def without_zero_advantages(batch: RankBatch, micro_batches: MicroBatches) -> MicroBatches:
    """Leave out samples whose advantages are all exactly 0 (where the mask is on), and micro-batches left empty."""
    advantages, masks = batch["advantages"], batch["loss_masks"]

    def moves_weights(i: int) -> bool:
        return bool((torch.as_tensor(advantages[i]) * torch.as_tensor(masks[i]) != 0).any())

    kept = [[i for i in indices if moves_weights(i)] for indices in micro_batches]
    return [indices for indices in kept if indices]


def weight(batch: RankBatch, micro_batches: MicroBatches, per_token: bool) -> float:
    """The weight of these samples in the step's mean, before the division by its rollouts or (``per_token``) tokens."""
    total = 0.0
    for indices in micro_batches:
        for i in indices:
            tokens = float(torch.as_tensor(batch["loss_masks"][i]).sum())
            total += tokens if per_token else tokens / max(float(batch["rollout_mask_sums"][i]), 1.0)
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
