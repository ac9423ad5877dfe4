"""Device memory of a run: what each phase holds on a GPU, in bytes.

The constants were measured on H200s (benchmarks/history.md); ``benchmarks/plan.md`` compares the
model with each row.
"""

from __future__ import annotations

from dataclasses import dataclass

from .setups import GIB, EngineSetup, GpuKind, Packs, Placement, PlannedModel, TrainSetup

CONTEXT = 0.6 * GIB
"""CUDA context of a process (h200_nccl_memory)."""
COMMUNICATORS = 2.6 * GIB
"""NCCL's buffers in a process that trains on several GPUs: 3.2 GiB with the context
(h200_nccl_memory).
"""
ENGINE_ASLEEP = 1.7 * GIB
"""What an engine keeps after it released weights and cache (h200_colocate: 1.66)."""
LIBRARIES = 1.4 * GIB
"""Compiled code, library handles and the allocator's rest in a trainer after its first step
(h200_step).
"""
KEPT_LOGITS = 4.0 * GIB
"""Logits of a micro-batch up to this size stay for the backward pass; larger ones are computed
again in chunks.
"""
CHUNK = 1.0 * GIB
"""A chunk of the LM head's float32 work."""
GATHERED_BUCKETS = 3.0 * GIB
BUCKETS = 0.5 * GIB
"""Trainer's memory in a weight sync with buckets of 512 MiB: FSDP also gathers and casts the
parameters (h200_step); Megatron has them in bf16 (h200_recipe_qwen3_4b)."""
FRAGMENTATION = 0.06
"""Share of the tensors that the allocator lost when a run ended out of memory: 7.5 of 122.3 GiB."""


@dataclass(frozen=True)
class TrainMemory:
    """Bytes of the trainer's tensors on one GPU.

    Attributes:
        head: Logits, their float32 chunk, and the LM head's weight and gradient in bf16.
        working: A layer that is computed again, and gathered weights.
        together: Whether gradients and all activations are there at the same time.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    head: float
    working: float
    together: bool

    @property
    def state(self) -> float:
        """What stays between steps."""
        return self.weights + self.optimizer

    @property
    def peak(self) -> float:
        """The largest sum in a training step."""
        forward = self.state + self.activations + self.head + self.working
        if self.together:
            return forward + self.gradients
        return max(forward, self.state + self.gradients + self.working)

    @property
    def scoring(self) -> float:
        """The largest sum in a log-prob pass, which keeps no activations. Two layers' tensors exist
        at a time.
        """
        kept = self.gradients if self.together else 0.0
        return self.state + kept + self.head + self.working


@dataclass(frozen=True)
class Phase:
    """Device memory of one GPU in one phase of a step, in bytes, by what holds it."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def train_memory(model: PlannedModel, train: TrainSetup, batch: Packs) -> TrainMemory:
    """Estimate the tensors of a training rank (of the first pipeline stage, which holds the most
    activations).
    """
    layout = train.layout
    dense = model.dense_layers / layout.pp + model.head_and_embedding / min(
        layout.pp, 2 if not model.tied else 1
    )
    trained = trained_parameters(model, train)
    # What the optimizer needs: weights, gradients and moments, each divided over the ranks that
    # share it.
    if train.backend == "fsdp":
        shards = train.ranks
        width = train.dtype_bytes if train.lora_rank else train.master_bytes
        weights = width * model.parameters / shards
        gradients = train.master_bytes * trained / shards
        optimizer = (train.moment_bytes if train.moments else 0.0) * trained / shards
        if train.lora_rank:
            weights += 4.0 * trained / shards
        if train.state_on_cpu:
            weights = gradients = optimizer = 0.0
        # FSDP frees the gradients after a step. Only sums over several micro-batches meet the
        # activations of the next.
        together = train.lora_rank == 0 and batch.count > 1
    else:
        own = dense / layout.tp
        experts = model.experts / train.expert_split
        weights = 2.0 * (own + experts)
        if train.lora_rank:  # the base has neither gradients nor optimizer
            own = trained / layout.pp / layout.tp
            experts = 0.0
            weights += 2.0 * own
        gradients = float(train.gradient_bytes) * (own + experts)
        stepped = own + experts
        if train.distributed_optimizer:
            stepped = own / (layout.dp * layout.cp) + experts / train.expert_replicas
        optimizer = 0.0 if train.optimizer_on_cpu else 12.0 * stepped
        # Megatron's gradient buffers live as long as the model.
        together = True
    # What the backward pass needs: the inputs of the layers that are computed again, and all of the
    # others.
    layers = model.shape.layers / layout.pp
    under_way = min(layout.pp, batch.count)
    tokens = batch.tokens / layout.cp
    again = train.recomputed_share(model.shape.layers)
    per_layer = train.dtype_bytes * _kept_by_layer(model, train, batch) / layout.tp
    inputs = (
        0.0 if train.inputs_on_cpu else train.dtype_bytes * model.shape.hidden * tokens / layout.tp
    )
    kept = layers * under_way * ((1 - again) * per_layer + again * inputs)
    return TrainMemory(
        weights,
        gradients,
        optimizer,
        kept,
        _head(model, train, batch),
        _working(model, train, per_layer),
        together,
    )


def _kept_by_layer(model: PlannedModel, train: TrainSetup, batch: Packs) -> float:
    """Elements that a layer keeps on one context-parallel rank. Where ranks gather keys and values,
    each keeps those of the others as well.
    """
    own = batch.tokens / train.layout.cp
    s = model.shape
    gathered = 0.0 if train.by_heads else 2 * s.kv_heads * s.key_width * (batch.tokens - own)
    return model.kept_width * own + gathered


def trained_parameters(model: PlannedModel, train: TrainSetup) -> float:
    """Parameters that the optimizer changes: all, or those of an adapter on each matrix of the
    layers.
    """
    if not train.lora_rank:
        return float(model.parameters)
    # A and B of queries, keys and values, output, and the matrices of the MLP.
    s = model.shape
    q = s.heads * s.key_width
    kv = s.kv_heads * s.key_width
    widths = (
        (s.hidden + q) + 2 * (s.hidden + kv) + (q + s.hidden) + model.matrices * (s.hidden + s.ffn)
    )
    count = train.lora_rank * widths * s.layers
    if train.lora_experts:  # gate and up share the factor of their input
        each = model.matrices * s.expert_width + 2 * s.hidden
        count += train.lora_rank * s.sparse_layers * s.experts * each
    return float(count)


def _head(model: PlannedModel, train: TrainSetup, batch: Packs) -> float:
    split = train.layout.tp * train.layout.cp
    logits = train.dtype_bytes * model.shape.vocab * batch.scored / split
    own = 0.0
    # the weight in bf16, and its gradient in bf16 and, unless it is on the CPU, in float32
    if train.backend == "fsdp":
        master = 0.0 if train.state_on_cpu else 4.0
        own = (2.0 + (0.0 if train.lora_rank else 2.0 + master)) * model.embedding
    return min(logits, KEPT_LOGITS) + CHUNK + own


def _working(model: PlannedModel, train: TrainSetup, per_layer: float) -> float:
    # With FSDP, a rank of several with other experts gathers only its own.
    experts = model.experts / train.layout.ep
    elsewhere = model.experts - experts
    layer = (model.parameters - model.head_and_embedding - elsewhere) / model.shape.layers
    gathered = 0.0
    if train.backend == "fsdp":
        # FSDP gathers two layers at a time: the one that is computed, and the next one.
        if not train.reshard:
            gathered = 2.0 * (model.parameters - model.embedding - elsewhere)
        elif train.ranks > 1 or train.state_on_cpu:
            gathered = 2.0 * 2.0 * layer
        if train.lora_experts:  # W + B A of a layer, its gradient, and B A in float32
            gathered += (2 * train.dtype_bytes + 4) * experts / max(model.shape.sparse_layers, 1)
    return gathered + (per_layer if train.recomputed else 0.0)


def phases(
    model: PlannedModel,
    kind: GpuKind,
    train: TrainSetup | None,
    engine: EngineSetup | None,
    place: Placement,
    batch: Packs,
) -> list[Phase]:
    """List the device memory by phase, of a GPU that both sides share if they are colocated.

    Otherwise the phase ``generate`` is that of an engine's GPU, and the others are those of a
    training GPU.
    """
    # An engine takes its share of the device, whatever it needs of it.
    taken = engine.fraction * kind.memory if engine is not None else 0.0
    generate = {"engine's weights and KV cache": taken, "engine's context": ENGINE_ASLEEP}
    if train is None:
        return [Phase("generate", generate)] if engine is not None else []
    shared = place.colocate and engine is not None
    trainer = train_memory(model, train, batch)
    joined = COMMUNICATORS if train.layout.world_size > 1 else 0.0
    outside = {"outside of torch": CONTEXT + LIBRARIES + joined}
    states = {"weights": trainer.weights, "optimizer": trainer.optimizer}
    peak = dict(states)
    if train.backend == "megatron":
        states["gradients"] = trainer.gradients  # Megatron's buffers live as long as the model
    # What is on the device besides the trainer's tensors.
    beside = dict(outside)
    if shared:
        generate |= outside if place.offload_train else states | outside
        beside["engine"] = ENGINE_ASLEEP + (0.0 if place.offload_rollout else taken)
    found = [Phase("generate", generate)] if engine is not None else []
    # A log-prob pass keeps no activations.
    work = {"LM head": trainer.head, "a layer's work": trainer.working}
    found.append(Phase("log-probs", {**states, **work, **beside}))
    # The end of the forward pass, or of the backward pass if that needs more.
    if trainer.together:
        peak["gradients"] = trainer.gradients
    peak |= {"activations": trainer.activations, **work}
    if not trainer.together:  # the rest of what the end of the backward pass needs beyond its start
        peak["gradients"] = trainer.peak - sum(peak.values())
    room = {"fragmentation": FRAGMENTATION * trainer.peak}
    found.append(Phase("train", {**peak, **room, **beside}))
    # The buckets of a weight sync, beside what is still on the device.
    megatron = train.backend == "megatron"
    # the optimizer's state has left before
    alone = megatron or (shared and place.offload_train)
    sync = {"weights": trainer.weights} if alone else dict(states)
    sync |= {"buckets": BUCKETS if megatron else GATHERED_BUCKETS, **beside}
    if shared and engine is not None and place.offload_rollout:
        sync["engine's weights"] = engine_weights(model, engine)
    return [*found, Phase("weight sync", sync), Phase("save", {**states, **beside})]


def engine_weights(model: PlannedModel, engine: EngineSetup) -> float:
    """Bytes of the weights on each GPU of an engine."""
    kept = model.head_and_embedding if engine.quantized else model.parameters
    return (engine.dtype_bytes * kept + (model.parameters - kept)) / engine.gpus


def cache_tokens(model: PlannedModel, kind: GpuKind, engine: EngineSetup) -> float:
    """Tokens that the KV cache of an engine holds; not positive if not even the weights fit."""
    room = engine.fraction * kind.memory - engine_weights(model, engine)
    # Beyond the number of heads, ranks hold the same ones; the latent of multi-latent attention is
    # one for all of them.
    copies = min(engine.gpus, max(model.shape.kv_heads, 1)) if model.shape.kv_rank is None else 1
    return room * copies / max(model.cache_bytes_per_token(), 1)
