"""Which samples a rank trains in an optimizer step, and how many it may leave out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.data.convert import shared_prompts
from slime.data.fields import RankBatch
from slime.data.schedule import PackingSettings, pack_forward_only
from slime.models.segments import to_device

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


class ResponseValues:
    """Values per response token of all samples of a rank batch, put in one micro-batch after the other."""

    def __init__(self, batch: RankBatch, names: Sequence[str], device: torch.device) -> None:
        self.names, self.lengths = names, [int(x) for x in batch["response_lengths"]]
        self.starts = torch.tensor([0, *self.lengths]).cumsum(0)
        # One row per name, the samples end to end. It stays on the device until all values are there: a copy to the CPU
        # after each micro-batch would wait for its kernels, and the next one's could not be queued meanwhile. Tokens
        # that other context-parallel ranks score stay 0, so that the sum over these ranks is complete.
        self.flat = torch.zeros(len(names), sum(self.lengths), dtype=torch.float32, device=device)

    def put(self, indices: Sequence[int], own: list[Tensor] | None, scores: object) -> None:
        """
        Args:
            indices: of the micro-batch's samples in the batch; none for a dummy.
            own: which response tokens of each sample are this rank's; None for all.
            scores: has an attribute ``[R]`` for each of the names.
        """
        if not indices:
            return
        own = own or [torch.arange(self.lengths[i]) for i in indices]
        places = torch.cat([x + self.starts[i] for i, x in zip(indices, own, strict=True)])
        rows = to_device(places.numpy(), self.flat.device)
        for row, name in zip(self.flat, self.names, strict=True):
            row.index_copy_(0, rows, getattr(scores, name).float())

    def by_sample(self) -> dict[str, list[Tensor]]:
        """Per name one CPU tensor ``[response_length]`` for each sample."""
        return {n: list(row.split(self.lengths)) for n, row in zip(self.names, self.flat.cpu(), strict=True)}
