"""The micro-batches of a rank: the samples of an optimizer step, packs for forward passes, and
samples to skip.
"""

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
    """Return the rank's micro-batches of optimizer step ``step``, as positions of samples in the
    rank batch.

    Raises:
        IndexError: The batch has fewer steps.
    """
    counts = batch["num_microbatches"]
    if not 0 <= step < len(counts):
        raise IndexError(f"there is no step {step} in a batch with {len(counts)} optimizer steps")
    start = sum(counts[:step])
    return [list(indices) for indices in batch["micro_batch_indices"][start : start + counts[step]]]


def forward_only(
    settings: PackingSettings, batch: RankBatch, context_size: int, at_least: int = 1
) -> MicroBatches | None:
    """Return packs of at most ``--log-probs-max-tokens-per-gpu`` tokens for forward passes without
    backward.

    The result is None if such passes use the micro-batches of training. This is so if the flag is
    not given or equals the budget of training, or if batches are padded, so that the number of
    tokens does not determine what fits.

    Args:
        context_size: The number of ranks among which the tokens of each sample are divided.
        at_least: The least number of packs, if there are as many samples.
    """
    budget = settings.forward_max_tokens
    if budget is None or budget == settings.max_tokens or settings.pads:
        return None
    lengths = [int(n) for n in batch["total_lengths"]]
    prompts = shared_prompts(settings, batch, context_size)
    return pack_forward_only(settings, lengths, prompts, budget * context_size, at_least)


def without_zero_advantages(batch: RankBatch, micro_batches: MicroBatches) -> MicroBatches:
    """Remove samples whose advantages are exactly 0 for all unmasked tokens, and micro-batches that
    become empty.
    """
    advantages = batch["advantages"]
    masks = batch["loss_masks"]

    def moves_weights(i: int) -> bool:
        return bool((torch.as_tensor(advantages[i]) * torch.as_tensor(masks[i]) != 0).any())

    kept = [[i for i in indices if moves_weights(i)] for indices in micro_batches]
    return [indices for indices in kept if indices]


def weight(batch: RankBatch, micro_batches: MicroBatches, per_token: bool) -> float:
    """Return the weight of these samples in the mean of the step: their number of rollouts, or with
    ``per_token`` of tokens."""
    total = 0.0
    for indices in micro_batches:
        for i in indices:
            tokens = float(torch.as_tensor(batch["loss_masks"][i]).sum())
            total += (
                tokens if per_token else tokens / max(float(batch["rollout_mask_sums"][i]), 1.0)
            )
    return total


class ResponseValues:
    """Collects values per response token for all samples of a rank batch, one micro-batch after the
    other.
    """

    def __init__(self, batch: RankBatch, names: Sequence[str], device: torch.device) -> None:
        self.names = names
        self.lengths = [int(x) for x in batch["response_lengths"]]
        self.starts = torch.tensor([0, *self.lengths]).cumsum(0)
        # One row per name with the concatenated samples. It stays on the device until all values
        # are there: a copy to the CPU after each micro-batch would wait for its kernels, and the
        # kernels of the next one could not be queued meanwhile. Tokens that other context-parallel
        # ranks score stay 0, so that a sum over these ranks is complete.
        self.flat = torch.zeros(len(names), sum(self.lengths), dtype=torch.float32, device=device)

    def put(self, indices: Sequence[int], own: list[Tensor] | None, scores: object) -> None:
        """
        Args:
            indices: The positions of the micro-batch's samples in the batch; empty for a dummy.
            own: The response tokens of each sample that this rank has; None for all.
            scores: An object that has an attribute ``[R]`` for each of the names.
        """
        if not indices:
            return
        own = own or [torch.arange(self.lengths[i]) for i in indices]
        places = torch.cat([x + self.starts[i] for i, x in zip(indices, own, strict=True)])
        rows = to_device(places.numpy(), self.flat.device)
        for row, name in zip(self.flat, self.names, strict=True):
            row.index_copy_(0, rows, getattr(scores, name).detach().float())

    def by_sample(self) -> dict[str, list[Tensor]]:
        """Return for each name one CPU tensor ``[response_length]`` per sample."""
        return {
            n: list(row.split(self.lengths))
            for n, row in zip(self.names, self.flat.cpu(), strict=True)
        }
