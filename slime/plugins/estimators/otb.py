"""OTB: a baseline for each token, the mean of the group weighted by how much noise each response
has gathered so far.

Source: arXiv 2602.07078, the optimal token baseline. The noise of a token is the squared norm of the
gradient of its log-prob with respect to the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from slime.algorithms.algorithm import Entries, Row
from slime.algorithms.baselines import centred
from slime.algorithms.grpo import Grpo
from slime.algorithms.sequences import Reduce, keep_where

from .shared import old_log_probs

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-8


def path_noise(log_probs: Tensor, squared_probs: Tensor, mask: Tensor) -> Tensor:
    """Return W_t = Σ_{s ≤ t} (1 − 2π_s + Σ_v π_v²) over the trained tokens of a response, float64
    ``[T]``.

    Args:
        log_probs: Log π of the sampled tokens, ``[T]``.
        squared_probs: Σ_v π_v² over the vocabulary, ``[T]``.
        mask: ``[T]``.
    """
    noise = 1 - 2 * log_probs.double().exp() + squared_probs.double()
    return keep_where(mask, noise.clamp(min=0)).cumsum(0)


def token_baselines(
    rewards: Sequence[float],
    noise: Sequence[Tensor],
    groups: Sequence[int],
    places: Sequence[int],
    reduce: Reduce,
) -> list[Tensor]:
    """Return B_t = Σ_i W_it r_i / Σ_i W_it of each response, float64 ``[T]``, over the responses of
    its group that have a token t; 0 where it is the only one.

    This is a collective operation.

    Args:
        rewards: r of each response of this rank.
        noise: :func:`path_noise` of each.
        groups: The number of its group.
        places: Its position among the responses of all ranks.
    """
    import torch

    # A group may be divided among ranks: all of them learn which groups there are, and how long.
    count = int(reduce.over_data(torch.tensor(float(len(rewards)))))
    table = torch.zeros(count, 2, dtype=torch.float64)
    for place, group, own in zip(places, groups, noise, strict=True):
        table[place] = torch.tensor([group, len(own)])
    longest: dict[int, int] = {}
    for group, length in reduce.over_data(table).long().tolist():
        longest[group] = max(longest.get(group, 0), length)
    starts = dict(zip(longest, accumulate(longest.values(), initial=0), strict=False))
    # The sums of each place in each group, one after the other.
    sums = torch.zeros(3, sum(longest.values()), dtype=torch.float64)
    for reward, own, group in zip(rewards, noise, groups, strict=True):
        weights = own.cpu()
        terms = torch.stack([weights * reward, weights, torch.ones_like(weights)])
        sums[:, starts[group] : starts[group] + len(own)] += terms
    weighted, weights, responses = reduce.over_data(sums)
    baselines = (weighted / (weights + EPSILON)).masked_fill(responses < 2, 0.0)
    return [
        baselines[starts[group] : starts[group] + len(own)].to(own.device)
        for own, group in zip(noise, groups, strict=True)
    ]


class Otb(Grpo):
    """The optimal token baseline, of rewards minus the mean of their group: where one response is
    longer than all others, that mean is its baseline.
    """

    needs_old_log_probs = True
    needs_squared_probs = True
    row = Row(
        "r − Σ_i W_it·r_i / Σ_i W_it over the responses of the group that have a token t, with "
        "W_t = Σ_{s≤t} (1 − 2π_s + Σ_v π_v²); r − mean of the group where it is the only one",
        "clipped ρ",
        "one more forward pass, for Σ_v π_v²",
        "arXiv 2602.07078",
    )

    def group_baseline(self, rewards: Sequence[float]) -> Sequence[float]:
        return centred(rewards)

    def over_ranks(self, batch: Entries, advantages: list[Tensor], reduce: Reduce) -> list[Tensor]:
        import torch

        masks = [torch.as_tensor(mask) for mask in batch["loss_masks"]]
        scored = zip(old_log_probs(batch), batch["squared_probs"], masks, strict=True)
        noise = [path_noise(p, squared, mask) for p, squared, mask in scored]
        rewards = [float(reward) for reward in batch["rewards"]]
        places = batch.get("partition")
        places = range(len(rewards)) if places is None else [int(place) for place in places]
        groups = [int(group) for group in batch["group_indices"]]
        baselines = token_baselines(rewards, noise, groups, places, reduce)
        return [a - b.to(a.dtype) for a, b in zip(advantages, baselines, strict=True)]
