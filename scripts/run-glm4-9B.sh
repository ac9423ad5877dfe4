#!/usr/bin/env bash
# GLM-Z1-9B-0414 with GRPO and dynamic sampling on one node of 8 GPUs: 4 train, 4 generate.
#
#   hf download zai-org/GLM-Z1-9B-0414 --local-dir models/GLM-Z1-9B-0414
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
source "$checkout/scripts/models/glm4-9B.sh"

checkpoint GLM-Z1-9B-0414
# Groups whose rewards are all the same are dropped; 64 prompts are begun so that 32 remain.
ROLLOUT_ARGS+=(
    --over-sampling-batch-size 64
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
    --partial-rollout
)
PERF_ARGS+=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --context-parallel-size 2
    --max-tokens-per-gpu 4608
)
RESOURCE_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 4
    --rollout-num-gpus 4
    --rollout-num-gpus-per-engine 2
)

launch "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" "${PERF_ARGS[@]}" "${RESOURCE_ARGS[@]}" "$@"
