#!/usr/bin/env bash
# GLM-4.5 (355B-A32B) with GSPO on 8 nodes of 8 GPUs, which trainer and engines share: docs/en/examples/glm4.5-355B-A32B.md
#
#   hf download zai-org/GLM-4.5 --local-dir /shared/models/GLM-4.5
#   MODELS=/shared/models OUTPUTS=/shared/outputs RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265 \
#       bash scripts/run-glm4.5-355B-A32B.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
source "$checkout/scripts/models/glm4.5-355B-A32B.sh"

checkpoint GLM-4.5
ROLLOUT_ARGS+=(
    --over-sampling-batch-size 64
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
)
GRPO_ARGS+=(--advantage-estimator gspo --eps-clip 1e-4 --eps-clip-high 2e-4)
OPTIMIZER_ARGS+=(--optimizer-cpu-offload)
# 64 ranks = 8 tensor x 4 pipeline x 2 context; experts: 16 x 4 pipeline. 92 layers = 4 stages of 23.
PERF_ARGS+=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 4
    --context-parallel-size 2
    --expert-model-parallel-size 16
    --expert-tensor-parallel-size 1
    --grad-reduce-in-bf16
    --max-tokens-per-gpu 8192
)
RESOURCE_ARGS=(
    --actor-num-nodes 8
    --actor-num-gpus-per-node 8
    --colocate
    --rollout-num-gpus-per-engine 32
    --sglang-mem-fraction-static 0.7
    --use-fault-tolerance
)

launch "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" "${PERF_ARGS[@]}" "${RESOURCE_ARGS[@]}" "$@"
