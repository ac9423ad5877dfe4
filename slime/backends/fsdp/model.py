"""Build the trained model and shard it."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from slime.backends.bank import shard_of
from slime.backends.collectives import local
from slime.backends.fsdp.experts import (
    data_mesh,
    divide_experts,
    exchange_tokens,
    expert_mesh,
    experts_of,
)
from slime.backends.fsdp.hf_weights import (
    DTYPES,
    read_checkpoint,
    require_same_names,
    share_weight_conversions,
)
from slime.backends.fsdp.lora import add_adapter
from slime.backends.fsdp.low_precision import quantize_base, use_float8
from slime.backends.loss_type import LossType
from slime.backends.offload import copied_to
from slime.backends.trainable import Patterns, lora_settings, select_trainable
from slime.config.algorithm import registered_loss
from slime.config.args import Args
from slime.config.hf_config import rotary_limit
from slime.config.lora import LoraConfig
from slime.config.seeds import derive_seed
from slime.config.trainer import TrainingPrecisionConfig
from slime.data.schedule import PackingSettings
from slime.models.fused import fuse, use_compiled_convolutions, use_compiled_norms
from slime.models.grouped_experts import use_grouped_experts
from slime.models.inputs import InputBuilder
from slime.models.layer_kinds import freeze_untrained
from slime.models.loading import (
    ModelError,
    backbone_of,
    decoder_layers,
    is_multimodal,
    one_layer_of_each_kind,
    plain_attention,
)
from slime.models.packed_layers import prepare_packing
from slime.models.scorer import PolicyScorer, ValueScorer, check_backward, check_scorer
from slime.registry import called_for

Scorer = PolicyScorer | ValueScorer
COMPILED_VARIANTS = 32  # with and without gradient, shared prompts or none, sliding windows, ...


def build_scorer(
    args: Args,
    role: str,
    device: torch.device,
    world_size: int,
    preloaded: PreTrainedModel | None = None,
) -> tuple[Scorer, InputBuilder]:
    """Check the model of a role, freeze parameters, shard it, and return it with its input builder.

    Trained parameters are float32 unless ``--bf16-master-weights`` is given. Only rank 0 reads the
    checkpoint and has all of it in memory; the other ranks get their shards from rank 0.

    Args:
        preloaded: What :func:`read_checkpoint` returned, if it was called before.

    Raises:
        ModelError: The checkpoint or its architecture cannot be trained with these flags.
    """
    # Other ranks build the model without memory, and need the conversions that rank 0 found.
    packing = PackingSettings.from_args(args)
    reads = world_size == 1 or dist.get_rank() == 0
    model = preloaded or read_checkpoint(args, empty=not reads)
    if world_size > 1:
        share_weight_conversions(model)
    _require_caps(model, args.attn_implementation)
    # The packed attention and the layers with a state are compared with plain transformers once, on
    # the rank that has the weights. A wrong kernel would train without an error.
    stateful = not packing.pads and prepare_packing(model)
    policy = PolicyScorer(model, args.log_probs_chunk_size)
    dtype = DTYPES[args.train_dtype]
    builder_on = partial(_builder, model, packing, args.data_pad_size_multiplier, dtype, stateful)
    if reads:
        _check(policy, builder_on(check_device(device, stateful)))
    if device.type == "cuda" and dtype == torch.bfloat16:
        _use_kernels(model, stateful, bool(args.compile_layers))
    policy.kernels = next((use(model) for use in called_for("kernels", args)), None)
    # Adapters derive from the classes of experts, so these are divided before.
    replica = args.fsdp_shard_size or world_size
    divided = _divide(model, device, world_size, replica, args.fsdp_expert_parallel_size)
    if (lora := lora_settings(args)) is not None:
        folder = args.load if role == "actor" else None
        add_adapter(model, decoder_layers(model), lora, args.seed, folder)
    # Parameters are selected by their names in the checkpoint before the casts, which treat trained
    # and frozen ones differently.
    scorer = _of_role(policy, role, registered_loss(args), args.seed)
    _select(scorer, model, args.only_train_params_name_list, args.freeze_params_name_list)
    _set_precision(scorer, decoder_layers(model), device, dtype, lora=args, precision=args)
    # Recomputation goes inside of compiled layers, and both inside of FSDP's hooks.
    if args.gradient_checkpointing:
        _checkpoint_layers(model, args.megatron, args.offload_activations)
    if args.compile_layers and policy.kernels is None:
        compile_layers(model)
        policy.fused = True
    mesh = None if world_size == 1 else shard_mesh(device, world_size, args.fsdp_shard_size)
    narrow = bool(args.megatron.get("grad_reduce_in_bf16"))
    sharding = ShardSettings(dtype, args.fsdp_reshard_after_forward, args.fsdp_cpu_offload, narrow)
    shard(scorer, model, device, mesh, sharding, divided)
    if world_size > 1:
        require_same_names(model)
    return scorer, builder_on(device)


def _require_caps(model: PreTrainedModel, attention: str | None) -> None:
    if attention == "sdpa" and plain_attention(model.config) == "eager":
        raise ModelError(
            f"{type(model).__name__} soft-caps its scores, which SDPA leaves out: use "
            "--attn-implementation eager"
        )


def _of_role(policy: PolicyScorer, role: str, loss: LossType | None, seed: int) -> Scorer:
    """Return what scores the model of ``policy`` for a role: log-probs, or values of its own head."""
    if role == "critic" or (loss is not None and loss.scores_responses):
        return ValueScorer(policy.hf, derive_seed(seed, "value head"))
    return policy


def _divide(
    model: PreTrainedModel, device: torch.device, world_size: int, replica: int, experts: int
) -> DeviceMesh | None:
    """Let ``experts`` ranks of a replica exchange the tokens of their experts; return the mesh that
    divides these."""
    if experts == 1:
        return None
    mesh = expert_mesh(device, world_size, replica, experts)
    exchange_tokens(decoder_layers(model), mesh)
    return mesh


def _set_precision(
    scorer: Scorer,
    layers: list[nn.Module],
    device: torch.device,
    dtype: torch.dtype,
    lora: LoraConfig,
    precision: TrainingPrecisionConfig,
) -> None:
    """Store the weights as the flags say: codes of a quantized base, a narrow base of an adapter,
    8-bit products.
    """
    if lora.lora_base_quantization:
        quantize_base(layers, lora.lora_base_quantization, device)
    if lora.lora_rank or precision.bf16_master_weights:
        _cast(scorer, dtype, trained=precision.bf16_master_weights)
    if precision.float8_training:
        use_float8(layers, precision.float8_training)


def _use_kernels(model: PreTrainedModel, stateful: bool, compiled: bool) -> None:
    """Exchange the kernels of transformers' layers for faster ones on a GPU."""
    fuse(compiled)
    use_grouped_experts(model)
    if stateful and compiled:
        use_compiled_convolutions(model.modules())
        use_compiled_norms(model.modules())


def _select(scorer: Scorer, model: PreTrainedModel, only: Patterns, freeze: Patterns) -> None:
    """Freeze what the patterns, and the kinds of layers, say is not trained."""
    names = {
        parameter: [name]
        for name, parameter in [*checkpoint_names(scorer), *model.named_parameters()]
    }
    # the names of the checkpoint, which a critic's own are not
    held = [(x, names[x]) for x in scorer.parameters()]
    head = "value_head." if isinstance(scorer, ValueScorer) else None
    select_trainable(held, list(names.values()), only, freeze, head)
    freeze_untrained(model)


def _check(policy: PolicyScorer, builder: InputBuilder) -> None:
    """Compare the packed model with its own forward, in float32 on the device of the builder."""
    with one_layer_of_each_kind(policy.hf), copied_to(policy.hf, builder.device, torch.float32):
        check_scorer(policy, builder)
        if builder.device.type == "cuda":
            check_backward(policy, builder)


def check_device(device: torch.device, stateful: bool) -> torch.device:
    """Return where the loaded model is checked: on the CPU, where it is, unless its layers have a
    state.

    With flash-linear-attention or causal-conv1d such layers have Triton and CUDA kernels only, so
    they are checked on the GPU. The embeddings and one layer of each kind must fit there in float32
    for a moment.
    """
    if device.type != "cuda" or not stateful:
        return torch.device("cpu")
    return device


def _builder(
    model: PreTrainedModel,
    packing: PackingSettings,
    multiple: int,
    dtype: torch.dtype,
    stateful: bool,
    device: torch.device,
) -> InputBuilder:
    on_cuda = device.type == "cuda"
    return InputBuilder(
        backbone=backbone_of(model),
        device=device,
        packed=not packing.pads,
        share_prompts=packing.shares_prompts,
        pad_to_multiple=multiple if on_cuda else 1,  # the CPU has no kernels to reuse
        longest=rotary_limit(model.config.get_text_config().to_dict()),
        float_dtype=dtype if on_cuda else torch.float32,
        stateful=stateful,
    )


def checkpoint_names(scorer: Scorer) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters (tied ones once) with the names that they have in the Hugging Face
    model.
    """
    return [(name.removeprefix("hf."), p) for name, p in scorer.named_parameters()]


def _cast(scorer: Scorer, dtype: torch.dtype, trained: bool) -> None:
    """Cast parameters to the dtype of forward passes: the base of an adapter, which never changes
    and so needs no wider copy, or with ``trained`` all parameters."""
    for parameter in scorer.parameters():
        if trained or not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _checkpoint_layers(
    model: PreTrainedModel, given: Mapping[str, Any], offload: bool = False
) -> None:
    """Let backward recompute the activations of each layer, or of the first decoder layers.

    This needs layers in training mode, but all modules in them stay in eval mode: dropout in the
    update of a policy would make its importance ratios wrong.

    Args:
        given: Megatron's flags, which say how many of them.
        offload: Keep the inputs of decoder layers in CPU memory until they are recomputed.
    """
    block = given.get("recompute_method") == "block"
    count = given.get("recompute_num_layers") if block else None
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules() if count is None else decoder_layers(model)[:count]:
        if isinstance(module, GradientCheckpointingLayer):
            # not .train(), which would also change the dropout modules of the layer
            module.training = True
    for layer in decoder_layers(model)[:count] if offload else ():
        layer._gradient_checkpointing_func = checkpoint_offloaded  # type: ignore[assignment]  # of transformers


def compile_layers(model: PreTrainedModel) -> None:
    """Compile the forward of each decoder layer. The model must be sharded afterwards, because FSDP
    adds hooks to it.

    Layers of one class share the compiled code. Shapes are dynamic from the start, because packs
    and their number of samples differ between micro-batches.
    """
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, COMPILED_VARIANTS)
    # With dynamic shapes, the scale of an adapter would be dynamic as well. torch then traces each
    # layer twice: at the end it finds out that the scale is constant, and starts again.
    dynamo.specialize_float = True
    compiled: dict[type, Any] = {}
    for layer in decoder_layers(model):
        kind = type(layer)
        if kind not in compiled:
            compiled[kind] = torch.compile(kind.forward, dynamic=True)
        layer.forward = types.MethodType(compiled[kind], layer)


def shard_mesh(device: torch.device, world_size: int, shard_size: int | None) -> DeviceMesh:
    """Return the device mesh for FSDP, in which ``shard_size`` consecutive ranks (None: all ranks)
    share a replica.

    Returns:
        A mesh of the shape ``(world_size,)``, or ``(replicas, shard_size)`` if there are several
        replicas.
    """
    if shard_size is None or shard_size == world_size:
        return init_device_mesh(device.type, (world_size,))
    return init_device_mesh(
        device.type, (world_size // shard_size, shard_size), mesh_dim_names=("replicate", "shard")
    )


@dataclass(frozen=True)
class ShardSettings:
    """How FSDP stores and moves the parameters.

    Attributes:
        dtype: That of passes.
        reshard_after_forward: Whether the parameters of a layer are gathered again for backward.
        offload: Parameters stay in CPU memory: FSDP's shards, or on one rank all of them.
        reduce_in_bf16: Gradients of a pass in bfloat16 are summed over ranks in bfloat16 instead of
            float32.
    """

    dtype: torch.dtype
    reshard_after_forward: bool
    offload: bool
    reduce_in_bf16: bool

    def policy(self) -> MixedPrecisionPolicy:
        if self.dtype == torch.float32:
            return MixedPrecisionPolicy()
        narrow = self.reduce_in_bf16 and self.dtype == torch.bfloat16
        reduce_dtype = self.dtype if narrow else torch.float32
        return MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=reduce_dtype)


def shard(
    scorer: Scorer,
    model: PreTrainedModel,
    device: torch.device,
    mesh: DeviceMesh | None,
    settings: ShardSettings,
    divided: DeviceMesh | None = None,
) -> None:
    """Apply FSDP2 with one group per decoder layer and one for the rest.

    It is not applied to one rank (``mesh`` is None): there is nothing to shard, and the hooks and
    copies of FSDP cost 7% of a step of SmolLM2 on the CPU (4.5 s for 64 samples, float32) and 6% of
    one of Qwen3-4B's shape on an H200. In bfloat16, :mod:`slime.backends.fsdp.gradients` keeps the
    float32 master weights instead.

    Vision towers belong to the root group. Ranks whose samples have no image do not run them, and
    would otherwise miss their collectives.

    Args:
        divided: Experts are groups of their own on this mesh; see
            :mod:`slime.backends.fsdp.experts`.
    """
    home = torch.device("cpu") if settings.offload else device
    if mesh is None:
        scorer.to(home)
        _move_buffers(scorer, device)
        return
    world_size = mesh.size()
    policy = settings.policy()
    # The values of rank 0 are kept by name, because FSDP replaces the parameters.
    layers = decoder_layers(model)
    whole = {name: p.detach() for name, p in scorer.named_parameters()}
    where = OffloadPolicy()
    if settings.offload:
        where = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    apply = partial(
        fully_shard, reshard_after_forward=settings.reshard_after_forward, offload_policy=where
    )
    for layer in layers:
        for experts in experts_of(layer) if divided is not None else ():
            assert divided is not None
            divide_experts(experts, divided, device)
            # The factors of their outputs stay as wide as the router made them.
            own = replace(policy, cast_forward_inputs=False)
            apply(experts, mesh=data_mesh(divided), mp_policy=own)
        apply(layer, mesh=mesh, mp_policy=policy)
    fully_shard(scorer, mesh=mesh, mp_policy=policy, offload_policy=where)
    if any(p.is_meta for p in scorer.parameters()):
        scorer.to_empty(device=home)
    _move_buffers(scorer, device)  # the parameters are where they belong already
    if world_size > 1:
        distribute(scorer, whole, device)
    if is_multimodal(model.config) and world_size > 1:
        scorer.anchored = _outside_of(layers, model, scorer)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            # Losses are shares of one global mean, so gradients are summed over ranks and not
            # averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports only sums


def _outside_of(
    layers: list[nn.Module], model: PreTrainedModel, scorer: Scorer
) -> list[nn.Parameter]:
    """Return the trained parameters that are neither in decoder layers nor embeddings of tokens.

    A micro-batch without images does not run the vision tower, so its parameters have no gradient
    on that rank. FSDP reduces the root group as a whole, and its parameters must be the same on all
    ranks.
    """
    used = {
        id(p) for module in (*layers, model.get_input_embeddings()) for p in module.parameters()
    }
    return [p for p in scorer.parameters() if p.requires_grad and id(p) not in used]


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)


@torch.no_grad()
def distribute(scorer: Scorer, whole: dict[str, torch.Tensor], device: torch.device) -> None:
    """Send every rank its shards of rank 0's ``whole`` parameters, and the buffers, one tensor at a
    time.
    """
    for name, parameter in scorer.named_parameters():
        local(parameter).copy_(shard_of(from_first_rank(whole.pop(name), device), parameter))
    # including those that are not in a checkpoint, such as rotary frequencies
    for buffer in scorer.buffers():
        dist.broadcast(buffer, src=0)


def from_first_rank(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return rank 0's values of a whole tensor on ``device``. On other ranks, ``tensor`` gives only
    shape and dtype.

    This is a collective operation.
    """
    if dist.get_rank() == 0:
        tensor = tensor.detach().to(device)
    else:
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    dist.broadcast(tensor, src=0)
    return tensor


def checkpoint_offloaded(function: Callable[..., Any], hidden: Tensor, *rest: Any) -> Any:
    """Run a layer, and again in its backward pass, without keeping its first input on the device in
    between.

    It has the signature of the function that layers of transformers call for checkpointing.
    """
    if not torch.is_grad_enabled():
        return function(hidden, *rest)
    stash = _Stash(hidden)
    first = [hidden]

    def run(*others: Any) -> Any:
        # The closure must not hold the input after the first run. Gradients reach it through the
        # graph of that run; the second run only makes the values that this graph has not kept.
        return function(first.pop() if first else stash.fetch(), *others)

    return checkpoint(run, *rest, use_reentrant=False)


class _Stash:
    """The values of a tensor in CPU memory."""

    def __init__(self, tensor: Tensor) -> None:
        source = tensor.detach()
        self._device = tensor.device
        self._needs_grad = tensor.requires_grad
        if not source.is_cuda:
            self._host = source.clone()
            return
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        stream = _copy_stream(source.device)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            self._host.copy_(source, non_blocking=True)
        source.record_stream(stream)  # its memory is not given away before the copy is made
        self._copied = stream.record_event()

    def fetch(self) -> Tensor:
        """Return the values on the device of the tensor."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            return self._host.to(self._device, non_blocking=True).requires_grad_(self._needs_grad)
        return self._host.requires_grad_(self._needs_grad)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
