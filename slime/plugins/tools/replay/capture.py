"""Values from inside of a training step: what one sample adds to the loss, gradients, and the
outputs of modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slime.backends.loss import compute_loss
from slime.backends.loss_inputs import Scores, TokenBatch
from slime.backends.shared import SharedBackend
from slime.data.fields import RankBatch

BEFORE = "weights_before.safetensors"
AFTER = "weights_after.safetensors"
PER_TOKEN = (
    "loss_masks", "rollout_log_probs", "old_log_probs", "ref_log_probs", "teacher_log_probs", "advantages", "returns",
    "old_values", "kl", "staleness",
)  # fmt: skip
"""Entries of a batch with a value for each response token, which are shown for a sample if they are
there.
"""


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
    """

    step: int
    loss: float
    log_probs: Tensor
    gradient: Tensor
    index: Tensor


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
        name: torch.as_tensor(batch[name][position]).float()
        for name in PER_TOKEN
        if batch.get(name) is not None
    }
    length = int(batch["response_lengths"][position])
    return SampleFacts(torch.as_tensor(batch["tokens"][position]), length, numbers, per_token)


@contextmanager
def losses_of(backend: SharedBackend, position: int | None, found: list[InLoss]) -> Iterator[None]:
    """Add what a sample adds to the loss to ``found``, while training steps run in the context.

    Args:
        position: The position of the sample in this rank's batch; None if another rank has it.
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
        if position is not None and position in indices and separable:
            found.append(_in_loss(backend, batch, indices, step, scores, own, position))
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
        step, float(loss.detach()), log_probs.detach().float().cpu(), gradient.float().cpu(), index
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


def _whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().float().cpu().clone()


@contextmanager
def outputs_of(model: nn.Module, found: dict[str, Tensor]) -> Iterator[None]:
    """Add the first output of each call of each module of ``model`` to ``found``, by the module's
    name.
    """

    def keep(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor) and name not in found:
            found[name] = first.detach().cpu().clone()

    hooks = [
        module.register_forward_hook(partial(keep, name))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def alone(batch: RankBatch, position: int) -> RankBatch:
    """Return a batch with one sample of another, for a forward pass."""
    entries = {
        name: [batch[name][position]] for name in ("tokens", "total_lengths", "response_lengths")
    }
    media = batch.get("multimodal_train_inputs")
    if media is not None:
        entries["multimodal_train_inputs"] = [media[position]]
    return RankBatch({**entries, "group_indices": [0], "micro_batch_indices": [[0]]})


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
    found: dict[str, Tensor] = {}
    for position, index in enumerate(batch["sample_indices"]):
        facts = facts_of(batch, position)
        found[f"{int(index)}.tokens"] = facts.tokens
        found |= {f"{int(index)}.{name}": values for name, values in facts.per_token.items()}
    return found
