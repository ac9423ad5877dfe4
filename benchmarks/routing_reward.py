"""Reward function of ``gpu_pair.py routing``: random rewards, and a look at the routes of each
sample.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import numpy as np

from slime.data.sample import Sample
from slime.data.token_fields import decode_int32, experts_shape
from slime.engines import http
from slime.rollout.generate import get_model_url


async def compare(args: Any, sample: Sample, **_: object) -> float:
    """Ask for the experts of all tokens in one request, and note which share of the collected
    routes is the same.

    ``same`` and ``shifted`` are sums over tokens and layers of the share of experts in common, the
    second against the routes of the token before: what agrees by chance.
    """
    held = sample.rollout_routed_experts
    assert held is not None, "the sample has no routes"
    tokens = [int(token) for token in sample.tokens]
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_routed_experts": True,
    }
    layers, topk = experts_shape(args)
    assert held.shape == (len(tokens) - 1, layers, topk), (held.shape, len(tokens), layers, topk)
    reward = random.Random(f"{sample.index} {len(tokens)}").random()
    output = await http.request("POST", get_model_url(args), body, 120.0)
    given = output["meta_info"].get("routed_experts")
    again = decode_int32(given or []).reshape(-1, layers, topk)[: len(tokens) - 1]
    if again.shape != held.shape:
        return reward  # the rollout has ended, and its requests with it
    line = {
        "index": sample.index,
        "requests": len(sample.weight_versions or []),
        "rows": (len(again) - 1) * layers,
        "same": common(held[1:], again[1:]),
        "shifted": common(held[1:], again[:-1]),
    }
    with open(os.environ["ROUTING_FILE"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return reward


def common(one: np.ndarray, other: np.ndarray) -> float:
    """Sum over ``[rows, layers]`` of the share of the top-k experts that are in both, in whatever
    order.
    """
    return float((one[..., :, None] == other[..., None, :]).any(-1).mean(-1).sum())
