#!/usr/bin/env bash
# Qwen3-4B with GRPO on one node of 8 GPUs, which trainer and engines share. Settings: scripts/recipe.sh.
#
#   hf download Qwen/Qwen3-4B --local-dir models/Qwen3-4B
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
source "$checkout/scripts/models/qwen3-4B.sh"

checkpoint Qwen3-4B
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

launch "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" "${PERF_ARGS[@]}" "${RESOURCE_ARGS[@]}" "$@"
