"""Flags of low precision and memory: quantized weights on the engines, and number formats of the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.config.flag import flag
from slime.config.hf_config import read_config
from slime.config.machine import installed

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

    rollout_quantization: str | None = flag(None, choices=("fp8",))
    """Quantize the weights of the engines. fp8: the projections of attention, MLP and experts are 8-bit floats
    (E4M3). Turns on --use-tis"""
    rollout_quantization_scale: str = flag("block", choices=("block", "channel", "tensor"))
    """What shares a scale with --rollout-quantization fp8: blocks of 128 x 128 weights, the weights of an output
    channel, or the whole tensor. SGLang can update only block"""


def check_quantized_model(args: Args) -> list[str]:
    """Refuse models of which SGLang would not quantize the same layers as slime."""
    if args.rollout_quantization is None or args.rollout_backend != "sglang" or not args.hf_checkpoint:
        return []
    architectures = set((read_config(args.hf_checkpoint) or {}).get("architectures") or ())
    option, other = f"--rollout-quantization {args.rollout_quantization}", "use the embedded engine"
    if lost := ", ".join(sorted(architectures & set(_NO_SCALES))):
        return [f"{option}: SGLang does not load the scales of blocks of {lost}; {other}"]
    if unknown := ", ".join(sorted(architectures - set(SGLANG_FAMILIES))):
        known = ", ".join(SGLANG_FAMILIES)
        return [f"{option}: slime does not know which layers of {unknown} SGLang quantizes, but of {known}; {other}"]
    return []


@dataclass
class TrainingPrecisionConfig:
    _title = "precision and memory of the trainer"

    loss_scale: float | None = flag(None, above=0)
    """Constant scale of the loss in float16. Default: it follows the overflows of gradients"""
    initial_loss_scale: float = flag(65536.0, above=0)
    """Scale of the loss in float16 at the start of a run"""
    min_loss_scale: float = flag(1.0, above=0)
    """Smallest scale of the loss in float16"""
    loss_scale_window: int = flag(1000, low=1)
    """Optimizer steps without an overflow after which the scale of the loss in float16 is doubled"""
    float8_training: str | None = flag(None, choices=("tensorwise", "rowwise", "rowwise_with_gw_hp"))
    """FSDP on CUDA: compute the linear layers of the decoder layers with 8-bit floats of torchao, with one scale
    per tensor or row (rowwise_with_gw_hp: gradients of weights in bfloat16)"""
    optimizer_8bit: bool = False
    """FSDP: keep Adam's moments in 8 bits (torchao): 2 instead of 8 bytes per parameter"""
    bf16_master_weights: bool = False
    """FSDP: keep master weights and gradients in bfloat16 and round updates stochastically (torchao): 4 instead of
    8 bytes per parameter. Needs --train-dtype bfloat16"""
    offload_activations: bool = False
    """FSDP: keep the inputs of layers in CPU memory until the backward pass recomputes their activations; implies
    --gradient-checkpointing"""
    fsdp_cpu_offload: bool = False
    """FSDP on CUDA: keep master weights, gradients and optimizer in CPU memory, and run the optimizer there"""


_TORCHAO = ("float8_training", "optimizer_8bit", "bf16_master_weights")


def check_torchao(args: Args) -> list[str]:
    given = [name for name in (*_TORCHAO, "lora_base_quantization") if getattr(args, name)]
    if not given or installed("torchao"):
        return []
    options = ", ".join("--" + name.replace("_", "-") for name in given)
    return [f"{options}: torchao is not installed; run pip install 'slime-rl[torchao]'"]
