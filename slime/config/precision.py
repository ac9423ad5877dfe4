"""Flags of low precision and memory: quantized weights on the engines, and number formats of the trainer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from slime.config.flag import flag
from slime.config.hf_config import read_config
from slime.config.machine import Machine, installed

if TYPE_CHECKING:
    from slime.config.args import Args

SGLANG_FAMILIES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures of which SGLang quantizes exactly the projections that slime sends as 8-bit floats."""
_NO_SCALES = ("LlamaForCausalLM", "MistralForCausalLM")
"""Architectures of which SGLang (0.5.15 and 0.5.23) loads no scales of blocks: it renames them to those of tensors, and
ignores names that it does not know. The scales would keep the values of uninitialized memory."""


@dataclass
class RolloutPrecisionConfig:
    _title = "precision of the engines"

    rollout_quantization: str | None = flag(
        None,
        choices=("fp8",),
        help="Quantize the weights of the engines. fp8: the projections of attention, MLP and experts are "
        "8-bit floats (E4M3). Turns on --use-tis",
    )
    rollout_quantization_scale: str = flag(
        "block",
        choices=("block", "channel", "tensor"),
        help="What shares a scale with --rollout-quantization fp8: blocks of 128 x 128 weights, the weights of an "
        "output channel, or the whole tensor. SGLang can update only block",
    )


def check_rollout_quantization(args: Args) -> list[str]:
    option = f"--rollout-quantization {args.rollout_quantization}"
    if args.rollout_quantization is None:
        given = args.rollout_quantization_scale != "block"
        alone = "--rollout-quantization-scale has no effect without --rollout-quantization: add that flag"
        return [alone] if given else []
    problems = []
    if args.update_weight_mode == "delta":
        problems.append(
            f"{option} excludes --update-weight-mode delta, whose engines compare the bytes of unquantized weights: "
            "leave one of them out"
        )
    if args.rollout_external_engine_addrs:
        problems.append(
            f"{option}: slime starts engines from a quantized copy of the checkpoint, so it cannot be used with "
            "--rollout-external-engine-addrs"
        )
    if args.lora_rank:
        problems.append(
            f"{option} excludes --lora-rank: the base that the engine computes with would differ from the base that "
            "the adapter is trained on by its quantization, and no update corrects it; leave one of them out"
        )
    if args.rollout_backend == "sglang":
        problems += [f"{option}: {problem}" for problem in _sglang_problems(args)]
    return problems


def _sglang_problems(args: Args) -> list[str]:
    problems = []
    if args.rollout_quantization_scale != "block":
        problems.append(
            f"SGLang cannot update weights with --rollout-quantization-scale {args.rollout_quantization_scale}: after "
            "it has loaded such weights, it transposes them into parameters without a loader; use block"
        )
    if args.sglang.get("quantization"):
        problems.append("slime sets --sglang-quantization itself: leave it out")
    if args.sglang_config:
        problems.append("--sglang-config may give servers different sizes: use --rollout-num-gpus-per-engine")
    if args.rollout_dtype == "float32":
        problems.append("SGLang's 8-bit layers need --rollout-dtype bfloat16 or float16")
    config: dict[str, Any] = (read_config(str(args.hf_checkpoint)) if args.hf_checkpoint else None) or {}
    if lost := sorted(set(config.get("architectures") or ()) & set(_NO_SCALES)):
        return [*problems, f"SGLang does not load the scales of blocks of {', '.join(lost)}; use the embedded engine"]
    unknown = sorted(set(config.get("architectures") or ()) - set(SGLANG_FAMILIES))
    if unknown:
        problems.append(
            f"which layers of {', '.join(unknown)} SGLang quantizes is not known to slime; it knows "
            f"{', '.join(SGLANG_FAMILIES)}"
        )
    return problems


def check_quantization_device(args: Args, on_cpu: bool) -> list[str]:
    """Refuse quantized weights on SGLang servers without a GPU."""
    if args.rollout_quantization is None or args.rollout_backend != "sglang" or not on_cpu:
        return []
    return [
        f"--rollout-quantization {args.rollout_quantization}: SGLang's 8-bit layers need a GPU (on a CPU they need AMX "
        "and SGLang's CPU kernels); use --rollout-backend embedded"
    ]


@dataclass
class TrainingPrecisionConfig:
    _title = "precision and memory of the trainer"

    loss_scale: float | None = flag(
        None, above=0, help="Constant scale of the loss in float16. Default: it follows the overflows of gradients"
    )
    initial_loss_scale: float = flag(65536.0, above=0, help="Scale of the loss in float16 at the start of a run")
    min_loss_scale: float = flag(1.0, above=0, help="Smallest scale of the loss in float16")
    loss_scale_window: int = flag(
        1000, low=1, help="Optimizer steps without an overflow after which the scale of the loss in float16 is doubled"
    )
    float8_training: str | None = flag(
        None,
        choices=("tensorwise", "rowwise", "rowwise_with_gw_hp"),
        help="FSDP on CUDA: compute the linear layers of the decoder layers with 8-bit floats of torchao, with "
        "one scale per tensor or row (rowwise_with_gw_hp: gradients of weights in bfloat16)",
    )
    optimizer_8bit: bool = flag(
        False,
        help="FSDP: keep Adam's moments in 8 bits (torchao): 2 instead of 8 bytes per parameter",
    )
    bf16_master_weights: bool = flag(
        False,
        help="FSDP: keep master weights and gradients in bfloat16 and round updates stochastically (torchao): "
        "4 instead of 8 bytes per parameter. Needs --train-dtype bfloat16",
    )
    offload_activations: bool = flag(
        False,
        help="FSDP: keep the inputs of layers in CPU memory until the backward pass recomputes their activations; "
        "implies --gradient-checkpointing",
    )
    fsdp_cpu_offload: bool = flag(
        False,
        help="FSDP on CUDA: keep master weights, gradients and optimizer in CPU memory, and run the optimizer there",
    )


_TORCHAO = ("float8_training", "optimizer_8bit", "bf16_master_weights")
FSDP_PRECISION = (*_TORCHAO, "offload_activations", "fsdp_cpu_offload")
"""Flags that only the FSDP backend has."""


def check_training_precision(args: Args) -> list[str]:
    problems = _float16_problems(args)
    if args.train_backend != "fsdp":
        return problems  # megatron_flags refuses float16 and all other flags of this page
    small = [name for name in ("optimizer_8bit", "bf16_master_weights") if getattr(args, name)]
    options = " and ".join("--" + name.replace("_", "-") for name in small)
    if small and args.use_stateless_adam:
        problems.append(
            f"--use-stateless-adam keeps no moments, and {options} changes how they are kept: leave one out"
        )
    if args.bf16_master_weights and args.train_dtype != "bfloat16":
        problems.append(
            f"--bf16-master-weights with --train-dtype {args.train_dtype}: a pass would compute with more digits than "
            "the weights have; use --train-dtype bfloat16"
        )
    ranks = args.actor_num_nodes * (args.actor_num_gpus_per_node or 1)
    if args.bf16_master_weights and args.fsdp_shard_size not in (None, ranks):
        problems.append(
            "--bf16-master-weights with --fsdp-shard-size: replicas would round differently and diverge; leave "
            "--fsdp-shard-size out"
        )
    if args.bf16_master_weights and args.lora_rank:
        problems.append(
            "--bf16-master-weights has no effect on --lora-rank, whose base is in --train-dtype and whose factors are "
            "float32: leave it out"
        )
    if args.fsdp_cpu_offload:
        problems += _offload_problems(args, small)
    return problems + (_float8_problems(args) if args.float8_training else [])


def _float16_problems(args: Args) -> list[str]:
    problems = []
    if args.fp16 and args.train_dtype != "float16":
        problems.append(f"--fp16 and --train-dtype {args.train_dtype} exclude each other: leave one of them out")
    if args.fp16 and args.bf16:
        problems.append("--fp16 and --bf16 exclude each other: leave one of them out")
    scales = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window")
    if args.train_dtype != "float16":
        defaults = {one.name: one.default for one in fields(TrainingPrecisionConfig)}
        given = [f"--{name.replace('_', '-')}" for name in scales if getattr(args, name) != defaults[name]]
        problems += [f"{option} has no effect without --fp16: add it, or leave {option} out" for option in given]
    elif args.initial_loss_scale < args.min_loss_scale:
        problems.append(
            f"--initial-loss-scale {args.initial_loss_scale:g} is below --min-loss-scale {args.min_loss_scale:g}"
        )
    return problems


def _offload_problems(args: Args, small: list[str]) -> list[str]:
    why = dict.fromkeys(small, "torchao's optimizer needs a GPU to be fast")
    if args.lora_rank:
        why["lora_rank"] = "the base of an adapter has no gradients and no optimizer to offload"
    if args.fsdp_accumulate_unsharded_gradients:
        why["fsdp_accumulate_unsharded_gradients"] = "whole gradients would stay on the GPU"
    start = "--fsdp-cpu-offload excludes --"
    return [f"{start}{name.replace('_', '-')}: {reason}; leave one out" for name, reason in why.items()]


def _float8_problems(args: Args) -> list[str]:
    problems = []
    option = f"--float8-training {args.float8_training}"
    if args.train_dtype != "bfloat16":
        problems.append(f"{option} needs --train-dtype bfloat16")
    if args.lora_rank:
        problems.append(f"{option} excludes --lora-rank, whose layers are computed in --train-dtype: leave one out")
    if args.data_pad_size_multiplier % 16:
        problems.append(
            f"{option} needs packs of a multiple of 16 tokens: --data-pad-size-multiplier "
            f"{args.data_pad_size_multiplier} is none"
        )
    return problems


def check_precision_packages(args: Args, machine: Machine) -> list[str]:
    """Check what the flags of the trainer need from this machine."""
    problems = []
    if args.float8_training and not (machine.cuda or machine.in_cluster):
        problems.append(
            f"--float8-training {args.float8_training} needs a GPU with 8-bit floats (compute capability 8.9 or "
            "later), which this machine does not have: leave it out"
        )
    if args.fsdp_cpu_offload and args.train_backend == "fsdp" and not (machine.cuda or machine.in_cluster):
        problems.append("--fsdp-cpu-offload: without a GPU everything is in CPU memory already; leave it out")
    given = [name for name in (*_TORCHAO, "lora_base_quantization") if getattr(args, name)]
    if given and not installed("torchao"):
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        problems.append(f"{options}: torchao is not installed; run pip install 'slime-rl[torchao]'")
    return problems
