"""What a plan is made of: the trainer, the engines and the samples of a step."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp
from statistics import fmean

from slime.config.layout import ParallelLayout


@dataclass(frozen=True)
class Workload:
    """The samples of one rollout.

    Attributes:
        prompts, samples: Number of groups, and of samples in each.
        prompt_tokens, response_tokens: Mean lengths.
        longest: Largest length of a response.
        sigma: Standard deviation of the logarithm of the response lengths; 0 if all have the mean length.
        lengths: Measured response lengths in ascending order, instead of a log-normal distribution.
        steps: Optimizer steps per rollout.
        shared_prompts: Whether a micro-batch holds the prompt of a group once.
        log_prob_passes: Forward passes over all samples before training: old log-probs, reference, teacher.
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
        gradient_bytes: 2 or 4 per parameter (``--grad-reduce-in-bf16``). FSDP only sums them over ranks in so many.
        moments: Whether the optimizer keeps Adam's moments.
        optimizer_on_cpu: ``--optimizer-cpu-offload``.
        lora_rank: 0 without an adapter.
        lora_experts: Whether the adapter has factors for each routed expert.
        master_bytes, moment_bytes: FSDP's bytes per parameter of master weights (gradients have the same) and of both
            moments together (``--bf16-master-weights``, ``--optimizer-8bit``).
        state_on_cpu: ``--fsdp-cpu-offload``.
        inputs_on_cpu: ``--offload-activations``.
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
    float8: bool = False
    quantized_base: bool = False

    @property
    def fsdp_only(self) -> bool:
        """Whether an option is on that Megatron refuses."""
        small = self.master_bytes < 4 or self.moment_bytes < 8
        return small or self.state_on_cpu or self.inputs_on_cpu or self.float8 or self.quantized_base

    def recomputed_share(self, layers: int) -> float:
        return 1.0 if self.recomputed < 0 else min(self.recomputed / layers, 1.0)


@dataclass(frozen=True)
class EngineSetup:
    """The inference engines.

    Attributes:
        engines: Number of engines.
        gpus: GPUs of each, its tensor-parallel size.
        fraction: Share of a device's memory for weights and KV cache (``--sglang-mem-fraction-static``).
        slots: Largest number of requests that an engine runs at once.
        cuda_graphs: Whether decode steps are CUDA graphs.
        dtype_bytes: Bytes of a weight.
        quantized: Whether the matrices of the layers have 1 byte per weight (``--rollout-quantization fp8``).
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


@dataclass(frozen=True)
class Packs:
    """The micro-batches of one optimizer step on one data-parallel rank.

    Attributes:
        count: Number of micro-batches.
        tokens: Tokens of a micro-batch on all its context-parallel ranks together.
        scored: Response tokens of a micro-batch.
        length: Mean length of a sample.
        squares: Mean of the squared lengths over the square of the mean, which attention's cost follows.
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
    samples = work.count / work.steps / train.layout.dp
    budget = train.tokens * train.layout.cp
    prompt = work.prompt_tokens
    if work.shared_prompts:
        together = min(max(budget / work.length, 1.0), work.samples, samples)
        prompt /= max(together, 1.0)
    total = samples * (work.response_tokens + prompt)
    count = max(ceil(total / budget - 1e-6), 1)
    return Packs(count, total / count, samples * work.response_tokens / count, work.length, work.squares)
