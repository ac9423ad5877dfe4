"""What a plan is made of: the kind of GPU by its data sheet, the model by its config.json, the
trainer, the engines and the samples of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, exp, prod
from statistics import fmean

from slime.config.hf_config import read_config
from slime.config.layout import ParallelLayout
from slime.data.balance import ModelShape, forward_flops
from slime.models.shards import ModelError, local_folder, quantization_of, read_headers

GIB = 2.0**30


@dataclass(frozen=True)
class GpuKind:
    """One GPU and the links of its node.

    Attributes:
        memory: Bytes that CUDA reports as the device's whole memory.
        flops: Dense bf16 FLOP/s of the data sheet.
        bandwidth: Bytes/s of the device memory.
        link: Bytes/s in one direction between two GPUs of a node.
        network: Bytes/s in one direction of a GPU's share of the node's network.
        source: Where the figures come from.
        measured: Whether slime was measured on it. All other figures of it are extrapolated by its
            data sheet.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float
    source: str
    measured: bool = False


_KINDS = (
    GpuKind("h200", 139.8 * GIB, 989e12, 4.8e12, 450e9, 50e9, "NVIDIA H200 data sheet, SXM", measured=True),
    GpuKind("h100", 79.1 * GIB, 989e12, 3.35e12, 450e9, 50e9, "NVIDIA H100 data sheet, SXM5"),
    GpuKind("h20", 95.1 * GIB, 148e12, 4.0e12, 450e9, 50e9, "NVIDIA H20 data sheet"),
    GpuKind("a100", 79.2 * GIB, 312e12, 2.04e12, 300e9, 25e9, "NVIDIA A100 80 GB data sheet, SXM4"),
    GpuKind("a100-40gb", 39.4 * GIB, 312e12, 1.56e12, 300e9, 25e9, "NVIDIA A100 40 GB data sheet, SXM4"),
    GpuKind("b200", 178.4 * GIB, 2250e12, 7.7e12, 900e9, 50e9, "NVIDIA DGX B200 data sheet, per GPU"),
    GpuKind("l40s", 44.4 * GIB, 362e12, 0.86e12, 32e9, 12.5e9, "NVIDIA L40S data sheet, PCIe 4 without NVLink"),
)  # fmt: skip
KINDS = {kind.name: kind for kind in _KINDS}
"""By the name of ``slime plan --kind``."""


@dataclass(frozen=True)
class Workload:
    """The samples of one rollout.

    Attributes:
        prompts, samples: Number of groups, and of samples in each.
        prompt_tokens, response_tokens: Mean lengths.
        longest: Largest length of a response.
        sigma: Standard deviation of the logarithm of the response lengths; 0 if all have the mean
            length.
        lengths: Measured response lengths in ascending order, instead of a log-normal distribution.
        steps: Optimizer steps per rollout.
        shared_prompts: Whether a micro-batch holds the prompt of a group once.
        log_prob_passes: Forward passes over all samples before training: old log-probs, reference,
            teacher.
    """

    prompts: int = 32
    samples: int = 8
    prompt_tokens: float = 256.0
    response_tokens: float = 768.0
    longest: int = 1024
    sigma: float = 0.0
    steps: int = 1
    shared_prompts: bool = True
    log_prob_passes: int = 0
    lengths: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return self.prompts * self.samples

    @property
    def length(self) -> float:
        return self.prompt_tokens + self.response_tokens

    @property
    def squares(self) -> float:
        """Mean of the squared lengths over the square of the mean."""
        if not self.lengths:
            return exp(min(self.sigma, 1.0) ** 2)
        whole = [self.prompt_tokens + length for length in self.lengths]
        return fmean(length * length for length in whole) / fmean(whole) ** 2


@dataclass(frozen=True)
class TrainSetup:
    """How a model is trained.

    Attributes:
        backend: ``fsdp`` or ``megatron``.
        tokens: Tokens of a micro-batch on each GPU (``--max-tokens-per-gpu``).
        shards: Ranks over which FSDP splits parameters; 0 for all.
        recomputed: Layers whose activations are recomputed; -1 for all.
        gradient_bytes: 2 or 4 per parameter (``--grad-reduce-in-bf16``). FSDP only sums them over
            ranks in so many.
        moments: Whether the optimizer keeps Adam's moments.
        optimizer_on_cpu: ``--optimizer-cpu-offload``.
        lora_rank: 0 without an adapter.
        lora_experts: Whether the adapter has factors for each routed expert.
        master_bytes, moment_bytes: FSDP's bytes per parameter of master weights (gradients have the
            same) and of both moments together (``--bf16-master-weights``, ``--optimizer-8bit``).
        state_on_cpu: ``--fsdp-cpu-offload``.
        inputs_on_cpu: ``--offload-activations``.
        by_heads: ``--context-parallel-kind ulysses``.
        float8: ``--float8-training``.
        quantized_base: ``--lora-base-quantization``.
        compiled: Whether layers are compiled.
        reshard: FSDP frees gathered weights after the forward pass.
    """

    backend: str
    layout: ParallelLayout
    tokens: int = 16384
    shards: int = 0
    recomputed: int = 0
    gradient_bytes: int = 4
    moments: bool = True
    optimizer_on_cpu: bool = False
    distributed_optimizer: bool = True
    lora_rank: int = 0
    compiled: bool = True
    reshard: bool = True
    dtype_bytes: int = 2
    lora_experts: bool = False
    master_bytes: float = 4.0
    moment_bytes: float = 8.0
    state_on_cpu: bool = False
    inputs_on_cpu: bool = False
    by_heads: bool = False
    float8: bool = False
    quantized_base: bool = False

    @property
    def ranks(self) -> int:
        """Ranks over which FSDP splits parameters."""
        return self.shards or self.layout.world_size

    @property
    def expert_split(self) -> int:
        """Ranks over which Megatron splits the routed experts."""
        return self.layout.ep * self.layout.etp * self.layout.pp

    @property
    def expert_replicas(self) -> int:
        return max(self.layout.world_size // self.expert_split, 1)

    @property
    def fsdp_only(self) -> bool:
        """Whether an option is on that Megatron refuses."""
        small = self.master_bytes < 4 or self.moment_bytes < 8
        on_cpu = self.state_on_cpu or self.inputs_on_cpu
        return small or on_cpu or self.by_heads or self.float8 or self.quantized_base

    def recomputed_share(self, layers: int) -> float:
        return 1.0 if self.recomputed < 0 else min(self.recomputed / layers, 1.0)


@dataclass(frozen=True)
class EngineSetup:
    """The inference engines.

    Attributes:
        engines: Number of engines.
        gpus: GPUs of each, its tensor-parallel size.
        fraction: Share of a device's memory for weights and KV cache
            (``--sglang-mem-fraction-static``).
        slots: Largest number of requests that an engine runs at once.
        cuda_graphs: Whether decode steps are CUDA graphs.
        dtype_bytes: Bytes of a weight.
        quantized: Whether the matrices of the layers have 1 byte per weight
            (``--rollout-quantization fp8``).
    """

    engines: int = 1
    gpus: int = 1
    fraction: float = 0.8
    slots: int = 256
    cuda_graphs: bool = True
    dtype_bytes: int = 2
    quantized: bool = False


@dataclass(frozen=True)
class Placement:
    """Where both sides run, and what each leaves on the GPU while the other works."""

    colocate: bool = True
    offload_train: bool = True
    offload_rollout: bool = True
    gpus_per_node: int = 8
    critic_gpus: int = 0
    """GPUs that only a critic uses; what it does there is not planned."""


@dataclass(frozen=True)
class Packs:
    """The micro-batches of one optimizer step on one data-parallel rank.

    Attributes:
        count: Number of micro-batches.
        tokens: Tokens of a micro-batch on all its context-parallel ranks together.
        scored: Response tokens of a micro-batch.
        length: Mean length of a sample.
        squares: Mean of the squared lengths over the square of the mean, which attention's cost
            follows.
    """

    count: int
    tokens: float
    scored: float
    length: float
    squares: float = 1.0


def packs(work: Workload, train: TrainSetup) -> Packs:
    """Divide the samples of an optimizer step among the data-parallel ranks and into micro-batches.

    With shared prompts, a group's prompt counts once in each micro-batch that has samples of it.
    """
    # The samples of a rank, whose prompts count once for all samples of a group that share a
    # micro-batch.
    samples = work.count / work.steps / train.layout.dp
    budget = train.tokens * train.layout.cp
    prompt = work.prompt_tokens
    if work.shared_prompts:
        together = min(max(budget / work.length, 1.0), work.samples, samples)
        prompt /= max(together, 1.0)
    # Micro-batches are filled evenly, as the scheduler of a run does.
    total = samples * (work.response_tokens + prompt)
    count = max(ceil(total / budget - 1e-6), 1)
    return Packs(
        count, total / count, samples * work.response_tokens / count, work.length, work.squares
    )


def count_parameters(checkpoint: str | None) -> int:
    """Return the number of parameters in the headers of a Hugging Face checkpoint; 0 if they cannot
    be read here, or if it is quantized, so that a stored number can hold several.
    """
    folder = local_folder(checkpoint) if checkpoint else None
    if folder is None or quantization_of(read_config(str(folder)) or {}) is not None:
        return 0
    try:
        return sum(prod(header.shape) for header in read_headers(folder).values())
    except ModelError:  # Another check reports it, or the files have PyTorch's older format.
        return 0


_WITH_CACHE = (
    "attention",
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
)


@dataclass(frozen=True)
class PlannedModel:
    """A model as the planner sees it.

    Attributes:
        tied: Whether the LM head is the embedding.
        stored: Parameters in the headers of the checkpoint's files, see :func:`count_parameters`.
        others: Kinds of layers that are no attention and keep no KV cache, by their names in
            config.json.
        cached_layers: Layers with a KV cache; None for all.
    """

    shape: ModelShape
    tied: bool
    stored: int = 0
    others: tuple[str, ...] = ()
    cached_layers: int | None = None

    @classmethod
    def from_checkpoint(cls, checkpoint: str | None) -> PlannedModel | None:
        """Read config.json, and headers of weights where they are.

        None if config.json is not on this machine, or if layers, hidden size or vocabulary are not
        in it.
        """
        config = read_config(checkpoint) if checkpoint else None
        if config is None:
            return None
        # Layers without attention keep no KV cache.
        kinds = config.get("layer_types") or config.get("layers_block_type")
        kinds = [str(kind) for kind in kinds] if isinstance(kinds, list) else []
        if kinds and not config.get("num_hidden_layers"):
            config = config | {"num_hidden_layers": len(kinds)}
        shape = ModelShape.from_config(config)
        if shape is None or not shape.vocab:
            return None
        others = tuple(sorted({kind for kind in kinds if kind not in _WITH_CACHE}))
        cached = sum(kind in _WITH_CACHE for kind in kinds) if others else None
        # Where the weights are there, their headers say more than the formula.
        stored = count_parameters(checkpoint)
        return cls(shape, bool(config.get("tie_word_embeddings", False)), stored, others, cached)

    @property
    def matrices(self) -> int:
        return 3 if self.shape.gated else 2

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, which is also their number in an LM head of its own."""
        return self.shape.vocab * self.shape.hidden

    @property
    def head_and_embedding(self) -> int:
        return self.embedding * (1 if self.tied else 2)

    @cached_property
    def active(self) -> int:
        """Parameters that multiply a token in all layers, without embedding and LM head.

        They follow from the FLOPs of one token: 2 per parameter, besides those of attention.
        """
        attention = (
            self.shape.layers * self.shape.heads * (self.shape.key_width + self.shape.value_width)
        )
        return int((forward_flops(self.shape, 1) - attention) / 2) - self.embedding

    @property
    def experts(self) -> int:
        """Parameters of all routed experts."""
        s = self.shape
        return s.sparse_layers * s.experts * self.matrices * s.hidden * s.expert_width

    @property
    def active_experts(self) -> int:
        """Parameters of the routed experts that multiply a token."""
        s = self.shape
        return (
            s.sparse_layers * s.experts_per_token * self.matrices * s.hidden * s.expert_width
            if s.experts
            else 0
        )

    @property
    def dense_layers(self) -> int:
        """Parameters of all layers except routed experts: attention, routers, dense and shared
        MLPs, norms.

        Where the files say how many parameters there are, these are what the other parts leave.
        """
        if self.stored:
            return max(self.stored - self.experts - self.head_and_embedding, 0)
        return self.active - self.active_experts + 2 * self.shape.layers * self.shape.hidden

    @property
    def parameters(self) -> int:
        return self.dense_layers + self.experts + self.head_and_embedding

    @property
    def kept_width(self) -> float:
        """Elements per token that a layer keeps for its backward pass, the mean over layers.

        Needed even if everything that can be fused is fused: the layer's input, queries, keys and
        values, queries and keys after norm and rotation, the output of attention, the middle of the
        layer, and gate and up. In addition, measured: the outputs of the two norms and a second
        copy of queries, keys and values.
        """
        s = self.shape
        q = s.heads * s.key_width
        kv = s.kv_heads * s.key_width
        dense = s.ffn
        sparse = s.experts_per_token * s.expert_width + s.shared_expert_width
        middle = (dense * (s.layers - s.sparse_layers) + sparse * s.sparse_layers) / s.layers
        # In the order of the layer.
        needed = s.hidden + (q + 2 * kv) + (q + kv) + q + s.hidden + (self.matrices - 1) * middle
        return needed + 2 * s.hidden + (q + 2 * kv)

    def cache_bytes_per_token(self) -> int:
        """Bytes of the KV cache per token, in bf16."""
        s = self.shape
        layers = self.shape.layers if self.cached_layers is None else self.cached_layers
        if s.kv_rank is not None:
            return layers * (s.kv_rank + s.rope_width) * 2
        return layers * s.kv_heads * (s.key_width + s.value_width) * 2
