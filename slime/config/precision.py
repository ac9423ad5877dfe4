"""Flags of low precision: quantized weights on the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.config.flag import flag
from slime.config.hf_config import read_config

if TYPE_CHECKING:
    from slime.config.args import Args

SGLANG_FAMILIES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Architectures of which SGLang quantizes exactly the projections that slime sends as 8-bit floats."""


@dataclass
class RolloutPrecisionConfig:
    _title = "precision of the engines"

    rollout_quantization: str | None = flag(
        None,
        choices=("fp8",),
        help="Quantize the weights of the engines. fp8: the projections of attention, MLP and experts are 8-bit floats "
        "(E4M3) that the trainer quantizes in each weight sync, about half the bytes of bfloat16. Turns on --use-tis",
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
