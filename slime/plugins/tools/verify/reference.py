"""The reference: plain transformers and autograd, one sample at a time, on one rank in float32 on
the CPU; and its fixed batch of random samples: groups that share a prompt, responses of unequal
lengths, masked tokens."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from slime.data.fields import RankBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Scores:
    """What a model computes for the fixed batch.

    Attributes:
        log_probs: By position of the sample in the batch, float32 ``[response_length]``.
        weights: By name in the checkpoint.
        gradients: The same, of the loss.
    """

    log_probs: dict[int, Tensor] = field(default_factory=dict)
    loss: float = 0.0
    grad_norm: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def reference_scores(
    folder: Path,
    samples: list[RandomSample],
    with_gradients: bool = True,
    trust_remote_code: bool = False,
) -> Scores:
    """Return the scores of the policy-gradient loss −Σᵢ rewardᵢ · meanₜ(ratio) / n, where each
    ratio is 1.

    The mean is over the tokens in the mask of the sample.
    """
    from transformers import AutoModelForCausalLM

    from slime.backends.fsdp.hf_weights import iter_hf_weights

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        trust_remote_code=trust_remote_code,
    ).eval()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            # a response may contain the padding token, which is trained like any other
            module.padding_idx = None
    found = Scores()
    if with_gradients:
        found.weights = {
            name: t.detach().clone() for name, t in iter_hf_weights(model, torch.float32)
        }
    # One sample at a time, without padding: nothing but the model and autograd decides about the
    # numbers.
    for position, sample in enumerate(samples):
        tokens = torch.tensor(sample["tokens"])
        mask = torch.tensor(sample["mask"], dtype=torch.float32)
        with torch.set_grad_enabled(with_gradients):
            logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
            scored = torch.log_softmax(logits[:-1], -1).gather(1, tokens[1:, None])[:, 0][
                -len(mask) :
            ]
            ratio = (scored - scored.detach()).exp()
            loss = -sample["reward"] * (ratio * mask).sum() / mask.sum().clamp(min=1) / len(samples)
        found.log_probs[position] = scored.detach()
        if with_gradients:
            found.loss += float(loss.detach())
            loss.backward()
    if with_gradients:
        found.gradients = _gradients(model)
        found.grad_norm = math.sqrt(
            sum(float((g.double() ** 2).sum()) for g in found.gradients.values())
        )
    return found


def _gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the gradients of a model under the names of its checkpoint, in float32.

    They take the place of the weights, because the export knows how to rename and reshape weights:
    the names and shapes of the checkpoint may differ from those of the modules (experts in one
    tensor, transposed matrices). Buffers have no gradient: they are filled with infinity, which
    marks what came from them.
    """
    from slime.backends.fsdp.hf_weights import iter_hf_weights

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
        # they have no gradient, and may have other names in the checkpoint
        for buffer in model.buffers():
            buffer.data = (
                torch.full_like(buffer, math.inf) if buffer.is_floating_point() else buffer
            )
    gradients = {name: t.detach().clone() for name, t in iter_hf_weights(model, torch.float32)}
    return {name: g for name, g in gradients.items() if not g.isinf().all()}


SIZE = 4
"""Samples of a group."""


class RandomSample(TypedDict):
    """A sample. ``mask`` has one entry for each response token; ``tokens`` are prompt and
    response.
    """

    tokens: list[int]
    mask: list[int]
    reward: float
    group: int


def make_samples(
    groups: int = 4, size: int = SIZE, seed: int = 0, zero_groups: int = 0, vocabulary: int = 61
) -> list[RandomSample]:
    """Return samples of groups that share a prompt; the last ``zero_groups`` have reward 0
    everywhere.
    """
    rng = random.Random(seed)
    samples: list[RandomSample] = []
    for group in range(groups):
        prompt = [rng.randrange(vocabulary) for _ in range(rng.randrange(3, 9))]
        for k in range(size):
            response = [rng.randrange(vocabulary) for _ in range(rng.randrange(2, 11))]
            mask = [1] * len(response)
            if k == 1:
                mask[0] = 0
            reward = 0.0 if group >= groups - zero_groups else rng.choice([-1.0, 0.5, 1.0])
            samples.append(
                RandomSample(tokens=prompt + response, mask=mask, reward=reward, group=group)
            )
    return samples


def make_batch(
    samples: list[RandomSample], micro_batches: list[list[list[int]]], everyone: list[RandomSample]
) -> RankBatch:
    """Return a rank's batch. ``micro_batches[step]`` are lists of positions in ``samples``."""
    rng = np.random.default_rng(7)
    # Log-probs of an engine that is a little off, the same on every rank.
    noise = {id(s): rng.normal(size=len(s["mask"])).astype(np.float32) * 0.1 for s in everyone}
    steps = len(micro_batches)
    return RankBatch(
        {
            "rollout_id": 0,
            "tokens": [torch.tensor(s["tokens"]) for s in samples],
            "total_lengths": [len(s["tokens"]) for s in samples],
            "response_lengths": [len(s["mask"]) for s in samples],
            "loss_masks": [torch.tensor(s["mask"], dtype=torch.int32) for s in samples],
            "rewards": [s["reward"] for s in samples],
            "raw_reward": [s["reward"] for s in samples],
            "truncated": [0] * len(samples),
            "sample_indices": list(range(len(samples))),
            "group_indices": [s["group"] for s in samples],
            "rollout_ids": list(range(len(samples))),
            "rollout_mask_sums": [float(sum(s["mask"])) for s in samples],
            "rollout_log_probs": [torch.from_numpy(noise[id(s)] - 3.0) for s in samples],
            "micro_batch_indices": [m for step in micro_batches for m in step],
            "num_microbatches": [len(step) for step in micro_batches],
            "global_batch_sizes": [len(everyone) // steps] * steps,
            "global_token_counts": [sum(max(sum(s["mask"]), 1) for s in everyone) / steps] * steps,
        }
    )


def batch_of_rank(rank: int, size: int, seed: int = 0, zero_groups: int = 0) -> RankBatch:
    """Return the batch of a data-parallel rank: group g goes to rank g mod ``size``, with a
    micro-batch per group.
    """
    samples = make_samples(seed=seed, zero_groups=zero_groups)
    # Groups stay together, since they share a prompt.
    mine = [s for s in samples if s["group"] % size == rank]
    return make_batch(
        mine, [[list(range(i, i + SIZE)) for i in range(0, len(mine), SIZE)]], samples
    )
