#!/usr/bin/env bash
# Qwen2.5-7B-Instruct with GRPO on one node of 8 GPUs, which trainer and engines share.
#
#   hf download Qwen/Qwen2.5-7B-Instruct --local-dir models/Qwen2.5-7B-Instruct
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
source "$checkout/scripts/models/qwen2.5-7B.sh"

checkpoint Qwen2.5-7B-Instruct
ROLLOUT_ARGS+=(--rollout-max-response-len 4096)
PERF_ARGS+=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --max-tokens-per-gpu 9216
)
RESOURCE_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --colocate
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
)

launch "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${DATA_ARGS[@]}" --rm-type math --math-answer any "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" "${PERF_ARGS[@]}" "${RESOURCE_ARGS[@]}" "$@"
