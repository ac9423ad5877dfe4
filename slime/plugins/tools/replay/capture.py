"""Values from inside of a training step: what one sample adds to the loss, gradients, and
the influence of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from slime.backends.loss import compute_loss
from slime.backends.loss_inputs import Scores, TokenBatch
from slime.backends.shared import SharedBackend
from slime.data.fields import FIELDS, RankBatch

BEFORE = "weights_before.safetensors"
AFTER = "weights_after.safetensors"


@dataclass
class InLoss:
    """What one sample adds to the loss of an optimizer step on one rank.

    Attributes:
        step: The optimizer step of the rollout in which the sample was trained.
        loss: Its share of the loss. The shares of all samples of the step add up to ``train/loss``.
        log_probs: float32 ``[tokens]``: the log-probs with which it was trained.
        gradient: float32 ``[tokens]``: ∂loss/∂log_probs, the weight with which each token moves the
            policy.
        index: int64 ``[tokens]``: the positions of these tokens in the response; with context
            parallelism, those of this rank.
        position: The position of the sample in the rank's batch.
    """

    step: int
    loss: float
    log_probs: Tensor
    gradient: Tensor
    index: Tensor
    position: int


@dataclass
class SampleFacts:
    """One sample of the replayed step.

    Attributes:
        tokens: The prompt and the response, int64 ``[total]``.
        numbers: Values of the whole sample: reward, raw reward and so on.
        per_token: float tensors ``[response_length]`` by name.
        parts: What it adds to the loss; a rank has none if the sample was skipped, or on other
            pipeline stages.
    """

    tokens: Tensor
    response_length: int
    numbers: dict[str, float]
    per_token: dict[str, Tensor]
    parts: list[InLoss] = field(default_factory=list)


def position_of(batch: RankBatch, sample: int) -> int | None:
    """Return the position of the sample with index ``sample`` in a rank's batch; None if another
    rank has it.
    """
    indices = [int(index) for index in batch["sample_indices"]]
    return indices.index(sample) if sample in indices else None


def facts_of(batch: RankBatch, position: int) -> SampleFacts:
    """Return what the batch says about a sample after the step."""
    numbers = {
        name: float(batch[name][position])
        for name in ("rewards", "raw_reward", "truncated", "group_indices", "sample_indices")
        if batch.get(name) is not None
    }
    per_token = {
        entry.name: torch.as_tensor(batch[entry.name][position]).float()
        for entry in FIELDS
        if entry.per == "response token" and batch.get(entry.name) is not None
    }
    length = int(batch["response_lengths"][position])
    return SampleFacts(torch.as_tensor(batch["tokens"][position]), length, numbers, per_token)


@contextmanager
def losses_of(
    backend: SharedBackend, positions: Collection[int], found: list[InLoss]
) -> Iterator[None]:
    """Add what samples add to the loss to ``found``, while training steps run in the context.

    Args:
        positions: The positions of the samples in this rank's batch; none if other ranks have them.
    """
    original = backend.share_of_loss

    def watched(
        batch: RankBatch,
        indices: list[int],
        step: int,
        scores: Scores,
        targets: Tensor,
        own: list[Tensor] | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # A custom loss is a function of the logits, so that it cannot be computed from the
        # log-probs of one sample.
        separable = (
            backend.loss_settings.loss_type != "custom_loss" and scores.log_probs is not None
        )
        if separable:
            found.extend(
                _in_loss(backend, batch, indices, step, scores, own, position)
                for position in indices
                if position in positions
            )
        return original(batch, indices, step, scores, targets, own)

    backend.share_of_loss = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        backend.share_of_loss = original  # type: ignore[method-assign]


def _in_loss(
    backend: SharedBackend,
    batch: RankBatch,
    indices: list[int],
    step: int,
    scores: Scores,
    own: list[Tensor] | None,
    position: int,
) -> InLoss:
    """Compute the loss of one sample of a micro-batch alone."""
    # The log-probs of this sample among those of its micro-batch, as leaves of a graph of their
    # own.
    lengths = (
        [len(part) for part in own]
        if own is not None
        else [int(batch["response_lengths"][i]) for i in indices]
    )
    place = indices.index(position)
    assert scores.log_probs is not None
    log_probs = torch.split(scores.log_probs.detach(), lengths)[place].clone().requires_grad_()
    entropy = (
        None if scores.entropy is None else torch.split(scores.entropy.detach(), lengths)[place]
    )
    tokens = TokenBatch.from_rank_batch(
        batch,
        [position],
        device=backend.device,
        response_index=None if own is None else [own[place]],
        log_probs=log_probs,
        entropy=entropy,
    )
    # Divided by the same numbers as in the step, so that the parts of all samples add up to its
    # loss.
    loss, _ = compute_loss(
        backend.loss_settings,
        tokens,
        num_rollouts=batch["global_batch_sizes"][step],
        num_tokens=batch["global_token_counts"][step],
        reduce=backend.reduce,
    )
    loss.backward()
    gradient = torch.zeros_like(log_probs) if log_probs.grad is None else log_probs.grad
    index = torch.arange(lengths[place]) if own is None else own[place].cpu()
    return InLoss(
        # With --train-during-rollout, it is a part of the only step.
        step if backend.args.train_during_rollout == 1 else 0,
        float(loss.detach()),
        log_probs.detach().float().cpu(),
        gradient.float().cpu(),
        index,
        position,
    )


@contextmanager
def gradients_of(backend: SharedBackend, found: list[dict[str, Tensor]]) -> Iterator[None]:
    """Add the whole gradients of each optimizer step, before they are clipped, to ``found``.

    All ranks must enter it together. A backend that keeps gradients in flat buffers (Megatron) has
    none to add.
    """
    original = backend.optimizer.grad_norm

    def watched() -> float:
        named = getattr(backend, "named_parameters", [])
        grads = {name: _whole(p.grad) for name, p in named if p.grad is not None}
        if grads:
            found.append(grads)
        return original()

    backend.optimizer.grad_norm = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        backend.optimizer.grad_norm = original  # type: ignore[method-assign]


@dataclass(frozen=True)
class Influence:
    """What one sample did to the update.

    Attributes:
        share: Its influence (:func:`influences_of`).
        tokens: The length of its response.
        advantage: The mean over its trained tokens.
    """

    index: int
    group: int
    reward: float
    advantage: float
    tokens: int
    share: float


def influences(batch: RankBatch, shares: list[tuple[int, float]]) -> list[Influence]:
    """Return the influence of each sample of a rank; a sample that is not trained has none."""
    found = []
    for position, index in enumerate(batch["sample_indices"]):
        facts = facts_of(batch, position)
        mask = facts.per_token["loss_masks"]
        found.append(
            Influence(
                int(index),
                int(facts.numbers["group_indices"]),
                facts.numbers["raw_reward"],
                float((facts.per_token["advantages"] * mask).sum() / mask.sum().clamp(min=1)),
                facts.response_length,
                sum(share for place, share in shares if place == position),
            )
        )
    return found


PERTURBATION = 2e-6
"""The norm of the change of the weights for :func:`influences_of`, relative to their norm: with
1e-4, the log-probs of SmolLM2-135M were so far from linear that the influences added up to 65%.
"""


@contextmanager
def influences_of(
    backend: SharedBackend,
    score: Callable[[], list[Tensor]],
    parts: list[InLoss],
    found: list[tuple[int, float]],
) -> Iterator[None]:
    """Add the influence of each sample on the update to ``found``, with its position in the batch.

    The influence is gᵢ·G / G·G, where gᵢ is the gradient of the sample's share of the loss and
    G = Σᵢ gᵢ that of the optimizer step, before it is clipped. So all influences of a step add up
    to 1. It is found without a backward pass for each sample: gᵢ·G is the derivative of
    Σₜ ∂loss/∂log_probₜ · log_probₜ along G, a central difference of two forward passes. All ranks
    must enter it together. A backend without ``named_parameters`` (Megatron) has none to add.

    Args:
        score: Returns the log-probs of all samples of the batch.
        parts: What :func:`losses_of` adds for all samples of the rank.
    """
    original = backend.optimizer.grad_norm

    def watched() -> float:
        norm = original()
        trained = [p for _, p in getattr(backend, "named_parameters", []) if p.grad is not None]
        if not (trained and norm > 0):
            return norm
        before = [p.detach().clone() for p in trained]
        size = PERTURBATION * float(_whole(nn.utils.get_total_norm(before)))
        sides = []
        for sign in (1.0, -1.0):
            with torch.no_grad():
                for p, old in zip(trained, before, strict=True):
                    assert p.grad is not None
                    p.copy_(old + p.grad.to(old.dtype) * (sign * size / norm))
            sides.append(score())
        with torch.no_grad():
            for p, old in zip(trained, before, strict=True):
                p.copy_(old)
        for part in parts[len(found) :]:
            up, down = (side[part.position].cpu()[part.index].double() for side in sides)
            slope = float(part.gradient.double() @ (up - down)) / (2 * size * norm)
            found.append((part.position, slope))
        return norm

    backend.optimizer.grad_norm = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        backend.optimizer.grad_norm = original  # type: ignore[method-assign]


def _whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().float().cpu().clone()


def save_tensors(folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a file of safetensors, if there are any."""
    from safetensors.torch import save_file

    if tensors:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {key: tensor.contiguous().cpu() for key, tensor in tensors.items()}, folder / name
        )


def tensors_of_batch(batch: RankBatch) -> dict[str, Tensor]:
    """Return the tensors of a batch after the step as ``<sample index>.<entry>``."""
    tensors: dict[str, Tensor] = {}
    for position, index in enumerate(batch["sample_indices"]):
        facts = facts_of(batch, position)
        tensors[f"{int(index)}.tokens"] = facts.tokens
        tensors |= {f"{int(index)}.{name}": values for name, values in facts.per_token.items()}
    return tensors
