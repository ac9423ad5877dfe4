#!/usr/bin/env bash
# Llama-3.1-8B-Instruct with GRPO on one node of 8 GPUs, which trainer and engines share.
#
#   hf download meta-llama/Llama-3.1-8B-Instruct --local-dir models/Llama-3.1-8B-Instruct
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
source "$checkout/scripts/models/llama3.1-8B-Instruct.sh"

checkpoint Llama-3.1-8B-Instruct
ROLLOUT_ARGS+=(--rollout-max-response-len 4096)
PERF_ARGS+=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --max-tokens-per-gpu 8192
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
