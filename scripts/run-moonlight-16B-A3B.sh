#!/usr/bin/env bash
# Moonlight-16B-A3B-Instruct (latent attention, 64 experts) with GSPO on one node of 8 GPUs.
#
#   hf download moonshotai/Moonlight-16B-A3B-Instruct --local-dir models/Moonlight-16B-A3B-Instruct
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
source "$checkout/scripts/models/moonlight.sh"

checkpoint Moonlight-16B-A3B-Instruct
ROLLOUT_ARGS+=(--rollout-max-response-len 4096)
GRPO_ARGS+=(--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4)
OPTIMIZER_ARGS+=(--optimizer-cpu-offload)
PERF_ARGS+=(
    --tensor-model-parallel-size 2
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
    --sglang-mem-fraction-static 0.6
    --trust-remote-code
)

launch "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${DATA_ARGS[@]}" --rm-type math --math-answer any "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" "${PERF_ARGS[@]}" "${RESOURCE_ARGS[@]}" "$@"
