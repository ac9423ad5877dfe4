"""Seconds of the phases of a step, from FLOPs, bytes and a handful of measured rates; of
generation, with requests of unequal length that share the decode steps of an engine.

Each constant holds for all models, layouts and kinds of GPU, as a share of what the data sheet
says.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, exp
from pathlib import Path
from random import Random
from statistics import NormalDist

from slime.data.balance import forward_flops
from slime.observability.samples import read_samples, sample_files

from .setups import EngineSetup, GpuKind, Packs, PlannedModel, TrainSetup, Workload

MATMUL = 0.726
"""Share of the data sheet's FLOP/s that large bf16 products reach under load: 718 of 989 (790 on a
cool GPU).
"""
GROUPED = 0.60
"""The same for the grouped products of experts: 590 TFLOP/s (h200_kernels_experts)."""
ATTENTION = 0.355
"""The same for FlashAttention 2, forward, for long samples: 351 TFLOP/s (h200_kernels_alone)."""
ATTENTION_HALF = 525.0
"""Length at which it reaches half of that: 232 TFLOP/s for samples of 1k tokens."""
ATTENTION_BACKWARD = 1.5
"""Seconds of its backward pass over those of two forward passes (3.0 forward passes in all;
h200_kernels_alone).
"""
MEMORY = 0.75
"""Share of the data sheet's bandwidth that elementwise kernels and Adam reach: Adam moves 3.5
TB/s.
"""
CACHE_READ = 0.60
"""The same for decode attention with SGLang's Triton kernels."""
ELEMENTWISE = 5.2
"""Times that the kept tensors of a layer move through memory, forward and backward; a third of it
forward.
"""
UNCOMPILED = 3.0
"""How often more without compiled layers."""
ROUTING = 26.0
"""Times that the rows of all experts move, forward and backward: sorting, gathers, sums
(h200_kernels_experts).
"""
HEAD_BYTES = 12.0
"""Bytes moved per logit for log-probs, entropy and gradient; a third of it forward."""
LAUNCH = 0.7e-3
"""Idle seconds of the GPU per layer and micro-batch between kernels, forward and backward; a third
of it forward.
"""
FSDP_STEP_BYTES = 40.0
MEGATRON_STEP_BYTES = 56.0
"""Bytes per parameter and optimizer step: norm, clipping, Adam; Megatron also clears and copies its
gradients.
"""
CPU_ADAM = 92e9
"""Bytes/s of Adam on 16 CPU cores, with the copies that it does not hide
(h200_optimizer_cpu_offload_november_30).
"""
TENSOR_PARALLEL = 0.31
"""Share of the link that the collectives around each layer reach: 140 of 450 GB/s
(h200_train_mfu_gpus).
"""
BULK = 0.75
"""The same for the large messages of data parallelism."""
HOST_COPY = 45e9
"""Bytes/s between host memory and GPU: 45 GiB of the trainer in 1.0 s (h200_step)."""
HOST_SHARDS = 16e9
"""Bytes/s of master weights in CPU memory that are cast and copied for a pass
(h200_train_mfu_november_26).
"""
DECODE_STEP = 1.5e-3
"""Seconds of a decode step besides memory and FLOPs: scheduling, sampling, launches of CUDA
graphs.
"""
DECODE_LAYER = 0.9e-3
"""Seconds per layer and decode step without CUDA graphs, when the host launches each kernel."""
HOST_STEP = 2.0e-3
HOST_REQUEST = 31e-6
"""Seconds of SGLang's scheduler in each decode step, and for each running request. They overlap the
GPU's work, so they limit small models: 490, 16,200 and 25,500 tokens/s at 1, 64 and 256 requests
(synchronous run of h200_async_two_gpus).
"""
ALL_REDUCE = 20e-6
"""Seconds of one all-reduce of few tokens, of which a layer has two."""
SYNC_FIXED = 0.35
"""Seconds of a weight sync besides the copies: calls to the engines, digests, pause (h200_step
0.47).
"""
SYNC_RATE = 80e9
"""Bytes/s of a weight sync over CUDA IPC or NCCL (h200_weight_sync: 8.0 GB in 0.10 s)."""


@dataclass(frozen=True)
class TrainSeconds:
    """Seconds of an optimizer step, of its parts, and of a log-prob pass over the same samples."""

    compute: float
    exchange: float
    optimizer: float
    scoring: float

    @property
    def step(self) -> float:
        return self.compute + self.exchange + self.optimizer


def train_seconds(
    model: PlannedModel, kind: GpuKind, train: TrainSetup, batch: Packs, gpus_per_node: int = 8
) -> TrainSeconds:
    """Estimate an optimizer step of ``batch.count`` micro-batches on every rank."""
    layout = train.layout
    # The work of one micro-batch.
    again = train.recomputed_share(model.shape.layers)
    layers, head = _forward(model, kind, train, batch)
    attention = _attention(model, kind, batch) / (layout.tp * layout.cp)
    layers_forward = layers.total + attention
    layers_backward = _backward(layers, train) + 2 * ATTENTION_BACKWARD * attention
    share = 1 / layout.pp  # The last stage has the LM head in addition, and the others wait for it.
    forward = share * layers_forward + head.total
    backward = _backward(head, train) + share * (layers_backward + again * layers_forward)
    # A pipeline fills and drains: it takes as many rounds more as it has stages, less one.
    rounds = batch.count + layout.pp - 1
    exchange = share * _exchange(model, kind, train, batch, gpus_per_node)
    read = _read_from_cpu(model, train)
    scoring = rounds * (forward + exchange + read)
    passes = 2.5 + again
    compute = rounds * (forward + backward)
    between = rounds * (passes * exchange + 3 * read)  # weights twice, gradients once
    sharded = _data_parallel(model, kind, train, batch, compute, gpus_per_node)
    return TrainSeconds(compute, between + sharded, _optimizer(model, kind, train), scoring)


@dataclass(frozen=True)
class _Forward:
    """Seconds of a forward pass: matrix products with weights, and all else."""

    products: float
    rest: float

    @property
    def total(self) -> float:
        return self.products + self.rest


def _backward(forward: _Forward, train: TrainSetup) -> float:
    """Seconds of the backward pass. Frozen weights have no gradients, which are half of its
    products.
    """
    return (1 if train.lora_rank else 2) * forward.products + 2 * forward.rest


def _forward(
    model: PlannedModel, kind: GpuKind, train: TrainSetup, batch: Packs
) -> tuple[_Forward, _Forward]:
    """Seconds of a micro-batch's forward pass on one group of model-parallel ranks: layers without
    attention, and the LM head."""
    s = model.shape
    layout = train.layout
    split = layout.tp * layout.cp
    tokens = batch.tokens / split
    # Products with weights: two FLOPs for each parameter and token.
    dense = 2.0 * (model.active - model.active_experts) * tokens / (MATMUL * kind.flops)
    experts = 2.0 * model.active_experts * tokens / (GROUPED * kind.flops)
    # Everything else moves tensors through memory.
    traffic = (
        ELEMENTWISE
        / 3
        * (1.0 if train.compiled else UNCOMPILED)
        * 2.0
        * model.kept_width
        * s.layers
        * tokens
    )
    if s.experts:
        traffic += ROUTING / 3 * 2.0 * s.experts_per_token * s.hidden * s.sparse_layers * tokens
    moved = traffic / (MEMORY * kind.bandwidth)
    head = 2.0 * model.embedding * batch.scored / split / (MATMUL * kind.flops)
    logits = HEAD_BYTES / 3 * s.vocab * batch.scored / split / (MEMORY * kind.bandwidth)
    return _Forward(dense + experts, moved + LAUNCH / 3 * s.layers), _Forward(head, logits)


def _read_from_cpu(model: PlannedModel, train: TrainSetup) -> float:
    """Seconds in which a pass copies the weights of a rank from CPU memory, or their gradients to
    it.
    """
    if not train.state_on_cpu:
        return 0.0
    return train.master_bytes * model.parameters / train.ranks / HOST_SHARDS


def _attention(model: PlannedModel, kind: GpuKind, batch: Packs) -> float:
    """Seconds of causal attention, forward, on one GPU for all tokens of a micro-batch."""
    s = model.shape
    length = batch.length * batch.squares
    flops = s.layers * s.heads * (s.key_width + s.value_width) * length * batch.tokens
    return flops / (ATTENTION * kind.flops * length / (length + ATTENTION_HALF))


def _link(kind: GpuKind, size: int, gpus_per_node: int) -> float:
    return kind.link if size <= gpus_per_node else kind.network


def _exchange(
    model: PlannedModel, kind: GpuKind, train: TrainSetup, batch: Packs, gpus_per_node: int
) -> float:
    """Seconds of a micro-batch's forward pass in which ranks of one model wait for each other's
    tensors.
    """
    s = model.shape
    layout = train.layout
    row = 2.0 * s.hidden * batch.tokens / layout.cp
    # How many ranks share tensors, over how many GPUs they are spread, and the bytes of these.
    shared = (
        # two gathers and two scatters of the sequence in each layer
        (layout.tp, layout.tp, 4.0 * s.layers * row),
        # rows go to their experts and back
        (
            layout.ep,
            layout.ep * layout.tp,
            2.0 * s.sparse_layers * row / layout.tp * s.experts_per_token,
        ),
        # keys and values of the other ranks
        (
            layout.cp,
            layout.cp * layout.tp,
            4.0 * s.layers * s.kv_heads * s.key_width * batch.tokens / layout.tp,
        ),
    )
    moved = [(spread, size * (ranks - 1) / ranks) for ranks, spread, size in shared]
    if layout.pp > 1:
        moved.append((layout.world_size, 2.0 * row * layout.pp))
    return (
        sum(size / _link(kind, spread, gpus_per_node) for spread, size in moved) / TENSOR_PARALLEL
    )


def _data_parallel(
    model: PlannedModel,
    kind: GpuKind,
    train: TrainSetup,
    batch: Packs,
    compute: float,
    gpus_per_node: int,
) -> float:
    """Seconds in which a rank waits for gathered weights and summed gradients."""
    layout = train.layout
    rate = BULK * _link(kind, layout.world_size, gpus_per_node)
    if train.backend == "fsdp":
        # Each rank gathers what it computes with, of which it has its share.
        gathered = model.parameters - model.experts * (1 - 1 / layout.ep)
        gathered -= model.parameters / train.ranks
        moved = (2.0 * 2 + train.gradient_bytes) * gathered * batch.count
        layers = max(model.shape.layers, 1)
        # The exchange of one layer overlaps the computation of another; the first gather and the
        # last sum do not.
        return max(moved / rate - 0.9 * compute, 0.0) + moved / rate / layers
    # Megatron sums gradients and gathers parameters once a step; experts have other replicas than
    # the rest.
    replicas = layout.dp * layout.cp
    own = model.dense_layers / layout.pp / layout.tp + model.head_and_embedding / layout.tp
    expert_replicas = train.expert_replicas
    experts = model.experts / train.expert_split
    each = train.gradient_bytes + 2.0
    moved = each * (
        own * (replicas - 1) / replicas + experts * (expert_replicas - 1) / expert_replicas
    )
    return moved / rate


def _optimizer(model: PlannedModel, kind: GpuKind, train: TrainSetup) -> float:
    layout = train.layout
    if train.lora_rank:
        return 0.0
    if train.backend == "fsdp":
        own = model.parameters / train.ranks
        if train.state_on_cpu:
            return 28.0 * own / CPU_ADAM
        return FSDP_STEP_BYTES * own / (MEMORY * kind.bandwidth)
    own = (model.dense_layers / layout.pp + model.head_and_embedding) / layout.tp
    experts = model.experts / train.expert_split
    stepped = own + experts
    if train.distributed_optimizer:
        stepped = own / (layout.dp * layout.cp) + experts / train.expert_replicas
    if train.optimizer_on_cpu:
        return 28.0 * stepped / CPU_ADAM
    # Clearing and copying concern the whole buffer of a rank, the optimizer its own share.
    local = MEGATRON_STEP_BYTES - FSDP_STEP_BYTES
    return (local * (own + experts) + FSDP_STEP_BYTES * stepped) / (MEMORY * kind.bandwidth)


def decode_seconds(
    model: PlannedModel, kind: GpuKind, engine: EngineSetup, running: float, context: float
) -> float:
    """Seconds of one decode step of an engine with ``running`` requests of ``context`` tokens
    (mean, prompt included).

    The sum of reading the weights, reading the KV cache, the FLOPs of the tokens, and what a step
    costs besides; or the time of the scheduler, if that is longer.
    """
    s = model.shape
    split = engine.gpus
    touched = float(model.parameters - model.experts)
    if s.experts:  # the expected share of experts that some request chooses
        missed = (1 - min(s.experts_per_token / s.experts, 1.0)) ** running
        touched += model.experts * (1 - missed)
    # Weights and KV cache are read once for all requests, whose tokens are few products.
    read = engine.dtype_bytes * touched / split / (MEMORY * kind.bandwidth)
    cache = (
        model.cache_bytes_per_token()
        * context
        * running
        / (min(split, max(s.kv_heads, 1)) if s.kv_rank is None else 1)
    )
    cache /= CACHE_READ * kind.bandwidth
    multiply = 2.0 * (model.active + model.embedding) * running / split / (MATMUL * kind.flops)
    fixed = DECODE_STEP if engine.cuda_graphs else DECODE_LAYER * s.layers
    gpu = read + cache + multiply + fixed + (2 * s.layers * ALL_REDUCE if split > 1 else 0.0)
    return max(gpu, HOST_STEP + HOST_REQUEST * running)


def prefill_seconds(
    model: PlannedModel, kind: GpuKind, engine: EngineSetup, tokens: float, length: float
) -> float:
    """Seconds of an engine for the prefill of ``tokens`` tokens in prompts of ``length``."""
    one = forward_flops(model.shape, max(int(length), 1)) / max(length, 1.0) - 2.0 * model.embedding
    return tokens * one / (0.5 * kind.flops * engine.gpus)


def sync_seconds(model: PlannedModel, engine: EngineSetup) -> float:
    """Seconds of a full weight sync. All engines receive the same buckets at the same time."""
    return SYNC_FIXED + engine.dtype_bytes * model.parameters / SYNC_RATE


MOST = 4096
"""Number of lengths that are kept: evenly from all, in ascending order."""


def measured_lengths(run: Path) -> tuple[int, ...]:
    """Read the response lengths of a run's samples.

    Returns:
        Up to :data:`MOST` lengths in tokens, in ascending order.

    Raises:
        ValueError: The folder has no samples, or a file of them is damaged.
    """
    lengths: list[int] = []
    for file in sample_files(run, "rollout").values():
        try:
            lengths += [int(row["response_length"]) for row in read_samples(file)]
        except (OSError, ValueError, LookupError, TypeError, OverflowError) as error:
            raise ValueError(f"{file} cannot be read ({type(error).__name__}: {error})") from error
    lengths.sort()
    if not lengths:
        raise ValueError(
            f"{run} has no samples/rollout_*.jsonl: give the folder of a run that finished a "
            "rollout"
        )
    # As many as are needed, evenly, so that the rare long ones are not lost.
    count = min(len(lengths), MOST)
    return tuple(max(lengths[(2 * i + 1) * len(lengths) // (2 * count)], 1) for i in range(count))


def response_lengths(work: Workload, count: int) -> list[int]:
    """Return ``count`` lengths that are spread evenly over their distribution, in an order that is
    always the same.

    The distribution is log-normal with mean ``response_tokens`` and ``sigma``, cut at ``longest``;
    the cut lowers the mean. Measured lengths are taken evenly in their order.
    """
    # Evenly from the distribution, so that a few lengths stand for it; shuffled, since requests
    # come in no order.
    if work.lengths:
        lengths = [
            work.lengths[(2 * i + 1) * len(work.lengths) // (2 * count)] for i in range(count)
        ]
        Random(0).shuffle(lengths)
        return lengths
    if not work.sigma:
        return [max(round(min(work.response_tokens, work.longest)), 1)] * count
    normal = NormalDist()
    median = work.response_tokens / exp(work.sigma**2 / 2)
    quantiles = (normal.inv_cdf((i + 0.5) / count) for i in range(count))
    lengths = [max(round(min(median * exp(work.sigma * z), work.longest)), 1) for z in quantiles]
    Random(0).shuffle(lengths)
    return lengths


@lru_cache(maxsize=512)  # a search plans each set of engines with many layouts
def rollout_seconds(
    model: PlannedModel, kind: GpuKind, engine: EngineSetup, work: Workload, slots: int
) -> float:
    """Estimate a rollout on ``engine.engines`` engines, each with an equal share of the requests.

    The engine has continuous batching: when a request ends, the next one starts. All running
    requests get one token in each decode step, whose duration follows from their number and mean
    context.

    Args:
        slots: Requests that an engine runs at once; the KV cache may hold fewer than
            ``engine.slots``.
    """
    share = max(ceil(work.count / engine.engines), 1)
    waiting = response_lengths(work, share)[::-1]
    # a heap of (step in which it ends, step in which it started)
    running: list[tuple[float, float]] = []
    step = seconds = started = 0.0
    # Time goes on from the end of one request to the next. Between two ends, all running requests
    # decode.
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
    # the samples of a group share its prompt in the cache
    prompts = share / work.samples * work.prompt_tokens
    return seconds + prefill_seconds(model, kind, engine, prompts, work.prompt_tokens)
