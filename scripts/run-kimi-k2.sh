#!/usr/bin/env bash
# Kimi-K2-Instruct (1T-A32B, latent attention, 384 experts) with GSPO on 32 nodes of 8 GPUs.
#
#   MODELS: a bfloat16 checkpoint under Kimi-K2-Instruct-bf16 (the one of the hub is FP8: python tools/dequantize_hf.py makes it)
#   MODELS=/shared/models OUTPUTS=/shared/outputs RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265 bash scripts/run-kimi-k2.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
source "$checkout/scripts/models/kimi-k2.sh"

checkpoint Kimi-K2-Instruct-bf16
ROLLOUT_ARGS+=(--rollout-max-response-len 4096)
GRPO_ARGS+=(--advantage-estimator gspo --eps-clip 1e-4 --eps-clip-high 2e-4)
OPTIMIZER_ARGS+=(--optimizer-cpu-offload)
# 256 ranks = 8 tensor x 8 pipeline x 4 context; experts: 32 x 8 pipeline. 61 layers = 7 x 8 + 5.
PERF_ARGS+=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 8
    --decoder-last-pipeline-num-layers 5
    --context-parallel-size 4
    --expert-model-parallel-size 32
    --expert-tensor-parallel-size 1
    --grad-reduce-in-bf16
    --max-tokens-per-gpu 8192
    --model-name deepseek_v3
)
RESOURCE_ARGS=(
    --actor-num-nodes 32
    --actor-num-gpus-per-node 8
    --colocate
    --rollout-num-gpus-per-engine 32
    --sglang-mem-fraction-static 0.7
    --trust-remote-code
    --use-fault-tolerance
)

launch "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${DATA_ARGS[@]}" --rm-type math --math-answer any "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" "${PERF_ARGS[@]}" "${RESOURCE_ARGS[@]}" "$@"
