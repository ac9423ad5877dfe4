"""Bias and variance of an estimator, beside those of RLOO and REINFORCE."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from slime.config.args import Args
from slime.plugins.tools.check_algo.lab import Lab
from slime.plugins.tools.check_algo.world import LENGTHS, ONE_LENGTH, Draws, draws

STALENESS = (0, 1, 4)
GROUP_SIZES = (2, 3, 4)


@dataclass(frozen=True)
class Moments:
    """Mean and variance of the gradient over batches.

    Attributes:
        mean: Its expectation, flat.
        variance: The trace of its covariance.
        error: The standard error of the mean; 0 if all batches were computed.
    """

    mean: np.ndarray
    variance: float
    error: float

    @property
    def noise(self) -> float:
        """The variance of a gradient of mean length 1, so that a factor does not count."""
        return self.variance / max(float(self.mean @ self.mean), 1e-30)

    @classmethod
    def of(cls, gradients: np.ndarray, batches: Draws) -> Moments:
        """Average gradients, one row for each batch."""
        mean = batches.weights @ gradients
        variance = float(batches.weights @ np.square(gradients - mean).sum(1))
        error = 0.0 if batches.exact else float(np.sqrt(variance / len(gradients)))
        return cls(mean, variance, error)


def moments(lab: Lab, sampler: torch.Tensor, batches: Draws) -> Moments:
    """Return the moments of the estimator's gradient, as the whole path of slime computes it."""
    rows = [lab.step(batch, sampler).gradient.flatten().numpy() for batch in batches.batches]
    return Moments.of(np.stack(rows), batches)


def reference(lab: Lab, sampler: torch.Tensor, batches: Draws, leave_one_out: bool) -> Moments:
    """Return the moments of RLOO or REINFORCE, from their formula: importance weights per token
    without a clip, and the mean over the tokens of each response, as is the run's default.
    """
    world = lab.world
    # For each response, the gradient of a sample with an advantage of 1.
    leaf = lab.table.clone().requires_grad_()
    vectors = np.zeros((world.prompts, len(world.responses), leaf.numel()))
    for prompt in range(world.prompts):
        for i, response in enumerate(world.responses):
            current = world.log_probs(leaf, prompt, response)
            ratio = (current.detach() - world.log_probs(sampler, prompt, response)).exp()
            vector = torch.autograd.grad((ratio * current).mean(), leaf)[0]
            vectors[prompt, i] = vector.flatten().numpy()
    chosen = np.array(batches.batches)  # [batches, prompts, samples]
    size = chosen.shape[2]
    prompts = np.arange(world.prompts)[None, :, None]
    advantages = np.array(world.rewards)[prompts, chosen]
    if leave_one_out:
        mean = advantages.mean(2, keepdims=True)
        advantages = (advantages - mean) * size / (size - 1)
    terms = advantages[..., None] * vectors[prompts, chosen]
    return Moments.of(terms.sum((1, 2)) / (size * world.prompts), batches)


@dataclass(frozen=True)
class Measured:
    """One row of the table.

    Attributes:
        bias: ‖E[g] / c − ∇J‖ / ‖∇J‖, where the factor c is that of the first row.
        cosine: Between E[g] and ∇J.
        length: ‖E[g]‖ / ‖∇J‖.
        to_rloo, to_reinforce: The noise relative to theirs.
        error: Twice the standard error of ``bias``; 0 if it is exact.
    """

    name: str
    bias: float
    cosine: float
    length: float
    to_rloo: float
    to_reinforce: float
    error: float


def _row(lab: Lab, staleness: float, name: str, factor: float | None = None) -> Measured:
    world = lab.world
    sampler = lab.older(staleness)
    batches = draws(world, sampler, lab.size)
    true = world.true_gradient(lab.table).flatten().numpy()
    found = moments(lab, sampler, batches)
    of_true = float(np.linalg.norm(true))
    of_mean = max(float(np.linalg.norm(found.mean)), 1e-30)
    factor = factor or float(found.mean @ true) / of_true**2
    rloo, reinforce = (reference(lab, sampler, batches, one).noise for one in (True, False))
    return Measured(
        name,
        float(np.linalg.norm(found.mean / factor - true)) / of_true,
        float(found.mean @ true) / (of_true * of_mean),
        of_mean / of_true,
        found.noise / rloo,
        found.noise / reinforce,
        2 * found.error / abs(factor) / of_true,
    )


def measure(args: Args, rewarded: bool) -> list[Measured]:
    """Return a row for each staleness, one for other lengths, and one for each group size.

    Args:
        rewarded: As for :class:`.lab.Lab`.
    """
    lab = Lab(args, ONE_LENGTH, args.n_samples_per_prompt, rewarded=rewarded)
    rows: list[Measured] = []
    for staleness in STALENESS:
        factor = rows[0].length * rows[0].cosine if rows else None
        rows.append(_row(lab, staleness, f"staleness {staleness}", factor))
    rows.append(_row(Lab(args, LENGTHS, 2, rewarded=rewarded), 0, "lengths 1 and 2"))
    # One prompt alone, so that there are few batches.
    alone = replace(ONE_LENGTH, rewards=ONE_LENGTH.rewards[:1])
    for size in GROUP_SIZES:
        rows.append(_row(Lab(args, alone, size, rewarded=rewarded), 0, f"groups of {size}"))
    return rows
