#!/usr/bin/env bash
# DeepSeek-R1 (671B-A37B, latent attention, 256 experts) with GSPO on 16 nodes of 8 GPUs.
#
#   MODELS: a bfloat16 checkpoint under DeepSeek-R1-bf16 (the one of the hub is FP8: python tools/dequantize_hf.py makes it)
#   MODELS=/shared/models OUTPUTS=/shared/outputs RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265 \
#       bash scripts/run-deepseek-r1.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
source "$checkout/scripts/models/deepseek-v3.sh"

checkpoint DeepSeek-R1-bf16
GRPO_ARGS+=(--advantage-estimator gspo --eps-clip 1e-4 --eps-clip-high 2e-4)
OPTIMIZER_ARGS+=(--optimizer-cpu-offload)
# 128 ranks = 8 tensor x 4 pipeline x 4 context; experts: 32 x 4 pipeline. 61 layers = 16 + 16 + 16 + 13.
PERF_ARGS+=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 4
    --decoder-last-pipeline-num-layers 13
    --context-parallel-size 4
    --expert-model-parallel-size 32
    --expert-tensor-parallel-size 1
    --grad-reduce-in-bf16
    --max-tokens-per-gpu 8192
)
RESOURCE_ARGS=(
    --actor-num-nodes 16
    --actor-num-gpus-per-node 8
    --colocate
    --rollout-num-gpus-per-engine 32
    --sglang-mem-fraction-static 0.7
    --use-fault-tolerance
)

launch "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" "${PERF_ARGS[@]}" "${RESOURCE_ARGS[@]}" "$@"
