#!/usr/bin/env bash
# Qwen3-30B-A3B with GSPO on one node of 8 GPUs, which trainer and engines share; 128 experts over 8 ranks.
#
#   hf download Qwen/Qwen3-30B-A3B --local-dir models/Qwen3-30B-A3B
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
source "$checkout/scripts/models/qwen3-30B-A3B.sh"

checkpoint Qwen3-30B-A3B
# Ratios of whole sequences: with experts, those of single tokens jump when routing does.
GRPO_ARGS+=(--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4)
# Gradients in bfloat16 and the optimizer in CPU memory: weights and gradients of 30B take 15 GB of each GPU.
OPTIMIZER_ARGS+=(--optimizer-cpu-offload)
PERF_ARGS+=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --grad-reduce-in-bf16
    --max-tokens-per-gpu 8192
)
RESOURCE_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --colocate
    --rollout-num-gpus-per-engine 8
    --sglang-mem-fraction-static 0.7
)

launch "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" "${PERF_ARGS[@]}" "${RESOURCE_ARGS[@]}" "$@"
