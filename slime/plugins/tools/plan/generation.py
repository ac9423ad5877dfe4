"""Seconds of a rollout: requests of unequal length that share the decode steps of an engine."""

from __future__ import annotations

import heapq
from functools import lru_cache
from math import ceil, exp
from random import Random
from statistics import NormalDist

from .gpus import GpuKind
from .seconds import decode_seconds, prefill_seconds
from .setups import EngineSetup, Workload
from .shape import PlannedModel


def response_lengths(work: Workload, count: int) -> list[int]:
    """Return ``count`` lengths that are spread evenly over their distribution, in an order that is always the same.

    The distribution is log-normal with mean ``response_tokens`` and ``sigma``, cut at ``longest``; the cut lowers the
    mean. Measured lengths are taken evenly in their order.
    """
    if work.lengths:
        lengths = [work.lengths[(2 * i + 1) * len(work.lengths) // (2 * count)] for i in range(count)]
        Random(0).shuffle(lengths)
        return lengths
    if not work.sigma:
        return [max(round(min(work.response_tokens, work.longest)), 1)] * count
    normal, median = NormalDist(), work.response_tokens / exp(work.sigma**2 / 2)
    quantiles = (normal.inv_cdf((i + 0.5) / count) for i in range(count))
    lengths = [max(round(min(median * exp(work.sigma * z), work.longest)), 1) for z in quantiles]
    Random(0).shuffle(lengths)
    return lengths


@lru_cache(maxsize=512)  # a search plans each set of engines with many layouts
def rollout_seconds(model: PlannedModel, kind: GpuKind, engine: EngineSetup, work: Workload, slots: int) -> float:
    """Estimate a rollout on ``engine.engines`` engines, each with an equal share of the requests.

    The engine has continuous batching: when a request ends, the next one starts. All running requests get one token in
    each decode step, whose duration follows from their number and mean context.

    Args:
        slots: Requests that an engine runs at once; the KV cache may hold fewer than ``engine.slots``.
    """
    share = max(ceil(work.count / engine.engines), 1)
    waiting = response_lengths(work, share)[::-1]
    running: list[tuple[float, float]] = []  # a heap of (step in which it ends, step in which it started)
    step = seconds = started = 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            heapq.heappush(running, (step + waiting.pop(), step))
            started += step
        end = running[0][0]
        context = work.prompt_tokens + (step + end) / 2 - started / len(running)
        seconds += (end - step) * decode_seconds(model, kind, engine, len(running), context)
        step = end
        while running and running[0][0] <= step:
            started -= heapq.heappop(running)[1]
    prompts = share / work.samples * work.prompt_tokens  # the samples of a group share its prompt in the cache
    return seconds + prefill_seconds(model, kind, engine, prompts, work.prompt_tokens)
