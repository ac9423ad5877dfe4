"""Flags of older releases that no longer exist: refused with what to use instead."""

from __future__ import annotations

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
