"""Flags of older releases that no longer exist are refused, and variables that nothing reads are pointed out."""

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
