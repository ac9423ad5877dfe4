"""Flags that do not exist are refused with the reason where it is known, and variables that nothing reads are named.

Known are the flags of older releases, and those that other frameworks have for what slime does not do.
"""

from __future__ import annotations

from collections.abc import Mapping

GONE: dict[str, str] = {
    "--use-critic": "--advantage-estimator ppo brings the critic",
    "--critic-load": "the critic starts from --hf-checkpoint and is kept in the run's snapshot",
    "--critic-save": "the critic is kept in the run's snapshot (--save)",
    "--critic-num-nodes": "the critic shares the trainer's GPUs",
    "--critic-num-gpus-per-node": "the critic shares the trainer's GPUs",
    "--use-slime-router": "sglang-router is the only router; --use-router puts it before a single engine",
    "--slime-router-middleware-paths": "sglang-router is the only router",
    "--slime-router-max-connections": "use --sglang-server-concurrency",
    "--slime-router-timeout": "use --sglang-router-request-timeout-secs",
    "--slime-router-health-check-failure-threshold": "use --use-fault-tolerance",
    "--megatron-to-hf-mode": "there is one conversion, and it is exact",
    "--qkv-format": "sequences are always packed",
    "--rollout-external": "name the servers with --rollout-external-engine-addrs",
    "--disable-rollout-trim-samples": "samples that fill no step are kept for the next rollout",
    "--disable-weights-backuper": "copies of weights are kept only where a flag needs them",
    "--train-memory-margin-bytes": "lower --max-tokens-per-gpu instead",
    "--true-on-policy-mode": "use --deterministic",
    "--use-dynamic-global-batch-size": "--global-batch-size counts rollouts, so it needs no adjustment",
    "--ci-metric-checker-key": "read metrics.jsonl of the run",
    "--ci-metric-checker-threshold": "read metrics.jsonl of the run",
    "--over-sampling-filter-path": "use --dynamic-sampling-filter-path",
    "--over-sampling-filter-input-size": "use --over-sampling-batch-size",
    "--rollout-num-gpus-per-node": "use --rollout-num-gpus",
    "--use-http2": "HTTP/1.1 with a connection pool is used",
}

_LORA = "LoRA is not supported yet; all weights are trained, or those that --only-train-params-name-list names"
_VLLM = "vLLM is not supported; --rollout-backend is sglang or embedded"
_DEEPSPEED = "DeepSpeed is not supported; --train-backend is fsdp or megatron"
_QUANTIZED = "quantized weights cannot be trained"
UNSUPPORTED: dict[str, str] = {
    "--lora-": _LORA,
    "--use-lora": _LORA,
    "--enable-lora": _LORA,
    "--peft-": _LORA,
    "--use-peft": _LORA,
    "--qlora": _LORA,
    "--vllm-": _VLLM,
    "--use-vllm": _VLLM,
    "--deepspeed": _DEEPSPEED,
    "--zero-stage": _DEEPSPEED,
    "--load-in-4bit": _QUANTIZED,
    "--load-in-8bit": _QUANTIZED,
}
"""What the flags of other frameworks begin with, and why slime has no such flag."""


def why_missing(option: str) -> str | None:
    """What to say of a flag that does not exist, or None where nothing is known about it.

    Args:
        option: as typed, with ``--``; ``_`` counts as ``-``.
    """
    option = option.replace("_", "-")
    if option in GONE:
        return f"is gone: {GONE[option]}"
    reason = next((reason for start, reason in UNSUPPORTED.items() if option.startswith(start)), None)
    return f"does not exist: {reason}" if reason else None


UNREAD_VARIABLES: dict[str, str] = {
    "SLIME_HOST_IP": "addresses are Ray's: ray start --node-ip-address",
    "SLIME_PREFER_IPV6": "addresses are Ray's: ray start --node-ip-address",
    "SLIME_ACCELERATOR": "CUDA is used where there is one",
    "SLIME_DESTROY_WORLD_PROCESS_GROUP": "process groups end with their processes",
    "SLIME_GRAD_COALESCE_CHUNK_BYTES": "gradients are reduced by FSDP and Megatron",
    "SLIME_ENABLE_EXPANDABLE_SEGMENTS": "set PYTORCH_CUDA_ALLOC_CONF with --train-env-vars",
    "ENABLE_ROUTING_REPLAY": "use --use-routing-replay",
    "ROUTING_REPLAY_STAGE": "use --use-routing-replay",
    "OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "there is no int4 training",
    "OPEN_TRAINING_INT4_FAKE_QAT_GROUP_SIZE": "there is no int4 training",
}
"""Environment variables of older releases that change nothing here."""
_PREFIXES = {
    "SLIME_LAYERWISE_ALIGNMENT_": "there is no such comparison",
    "SLIME_DEEPGEMM_MOE_": "there are no DeepGEMM kernels here",
}


def unread_variables(environment: Mapping[str, str]) -> list[str]:
    """One line for each variable that is set and that nothing reads."""
    found = []
    for name in sorted(environment):
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        reason = UNREAD_VARIABLES.get(name) or _PREFIXES.get(prefix)
        if reason:
            found.append(f"environment variable {name}: no effect: {reason}")
    return found
