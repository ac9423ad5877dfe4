"""A fixed batch of random samples: groups that share a prompt, responses of unequal lengths, masked tokens."""

from __future__ import annotations

import random
from typing import TypedDict

import numpy as np
import torch

from slime.data.fields import RankBatch

SIZE = 4
"""Samples of a group."""


class RandomSample(TypedDict):
    """A sample. ``mask`` has one entry for each response token; ``tokens`` are prompt and response."""

    tokens: list[int]
    mask: list[int]
    reward: float
    group: int


def make_samples(
    groups: int = 4, size: int = SIZE, seed: int = 0, zero_groups: int = 0, vocabulary: int = 61
) -> list[RandomSample]:
    """Return samples of groups that share a prompt; the last ``zero_groups`` have reward 0 everywhere."""
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
            samples.append(RandomSample(tokens=prompt + response, mask=mask, reward=reward, group=group))
    return samples


def make_batch(
    samples: list[RandomSample], micro_batches: list[list[list[int]]], everyone: list[RandomSample]
) -> RankBatch:
    """Return a rank's batch. ``micro_batches[step]`` are lists of positions in ``samples``."""
    rng = np.random.default_rng(7)
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
    """Return the batch of a data-parallel rank: group g goes to rank g mod ``size``, with a micro-batch per group."""
    samples = make_samples(seed=seed, zero_groups=zero_groups)
    mine = [s for s in samples if s["group"] % size == rank]
    return make_batch(mine, [[list(range(i, i + SIZE)) for i in range(0, len(mine), SIZE)]], samples)
