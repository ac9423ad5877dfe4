"""What both sides compute for the fixed batch of random samples (groups that share a prompt,
responses of unequal lengths, masked tokens): plain transformers and autograd, one sample at a time,
on one rank in float32 on the CPU; and a training rank.
"""

from __future__ import annotations

import gc
import math
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from slime.backends.base import TrainBackend
from slime.backends.create import create_backend
from slime.backends.train_loop import train_on_rollout
from slime.config.args import Args
from slime.data.fields import RankBatch

from ..local_ranks import Place
from .small import VOCAB

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
    scores = Scores()
    if with_gradients:
        scores.weights = {
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
        scores.log_probs[position] = scored.detach()
        if with_gradients:
            scores.loss += float(loss.detach())
            loss.backward()
    if with_gradients:
        scores.gradients = _gradients(model)
        scores.grad_norm = math.sqrt(
            sum(float((g.double() ** 2).sum()) for g in scores.gradients.values())
        )
    return scores


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
    groups: int = 4, size: int = SIZE, seed: int = 0, zero_groups: int = 0
) -> list[RandomSample]:
    """Return samples of groups that share a prompt; the last ``zero_groups`` have reward 0
    everywhere.
    """
    rng = random.Random(seed)
    samples: list[RandomSample] = []
    for group in range(groups):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(3, 9))]
        for k in range(size):
            response = [rng.randrange(VOCAB) for _ in range(rng.randrange(2, 11))]
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


LARGE = 1e6
STEP = 16.0
"""One step of Adam with an epsilon of :data:`LARGE` and a learning rate of ``LARGE · STEP`` changes
each weight by ``-STEP · gradient`` (its relative error is |gradient| / ``LARGE``). So the change of
the weights shows the gradient that the whole path has computed, with every sum over ranks, in the
same way for every backend and layout."""


@dataclass(frozen=True)
class VerifyJob:
    """What the ranks have to do.

    Attributes:
        model: The cut-down model, of which everything is computed.
        variants: Further models, of which only the log-probs are.
        groups: The number of groups in the batch.
    """

    backend: str
    megatron: dict[str, Any]
    flags: dict[str, Any]
    model: Path
    variants: tuple[Path, ...] = ()


def settings(job: VerifyJob, model: Path, world_size: int) -> Args:
    """Return the settings of a run that trains one step on the fixed batch in float32."""
    values: dict[str, Any] = {
        "hf_checkpoint": str(model),
        "ref_load": str(model),
        "train_backend": job.backend,
        "train_dtype": "float32",
        "attn_implementation": None,
        "num_rollout": 10,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "global_batch_size": 16,
        "micro_batch_size": 4,
        "eps_clip_high": 0.2,
        "kl_loss_type": "low_var_kl",
        "weight_decay": 0.0,
        "lr": LARGE * STEP,
        "adam_eps": LARGE,
        "clip_grad": 1e9,
        "deterministic": False,
        "threads_per_process": 1,
        "world_size": world_size,
        "megatron": dict(job.megatron),
    }
    return Args().with_values(**(values | job.flags))


def verify_rank(place: Place, job: VerifyJob) -> list[Scores]:
    """Return the scores of the model and of its variants on this rank. All ranks call this
    together.

    Log-probs are those of this rank's samples; weights and gradients are whole on every rank.
    """
    scores = []
    for number, model in enumerate([job.model, *job.variants]):
        args = settings(job, model, place.world_size)
        backend = create_backend(
            args, "actor", place.rank, place.world_size, place.address, place.port, place.rank
        )
        scores.append(_scores(backend, whole=number == 0))
        del backend
        leave_model()
    return scores


def leave_model() -> None:
    """End the process groups that a Megatron model has made, so that another one can be built."""
    if "megatron.core" in sys.modules:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    gc.collect()


def _scores(backend: TrainBackend, whole: bool) -> Scores:
    rank = backend.data_parallel_rank
    size = backend.data_parallel_size
    batch = batch_of_rank(rank, size)
    scores = Scores()
    batch.pop("rollout_log_probs")  # with them, the loss would be corrected for a gap to an engine
    everyone = [
        i for i, group in enumerate(batch_of_rank(0, 1)["group_indices"]) if group % size == rank
    ]
    scored = backend.log_probs(batch, temperature=1.0)["log_probs"]
    scores.log_probs = {
        position: values.cpu() for position, values in zip(everyone, scored, strict=True)
    }
    if not whole:
        return scores
    # The difference of the weights is the gradient, see STEP.
    before = _weights(backend)
    metrics, _ = train_on_rollout(backend, batch)
    after = _weights(backend)
    scores.loss = metrics["train/loss"]
    scores.grad_norm = metrics["train/grad_norm"]
    scores.weights = before
    scores.gradients = {name: (before[name] - after[name]) / STEP for name in before}
    return scores


def _weights(backend: TrainBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().float().cpu().clone() for name, tensor in backend.named_weights()}
