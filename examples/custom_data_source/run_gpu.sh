#!/usr/bin/env bash
# The same curriculum with Qwen3-4B on one node of 8 GPUs: 4 train (Megatron), 4 generate (SGLang).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$checkout/scripts/models/qwen3-4B.sh"

train custom_data_source_gpu train.py "${MODEL_ARGS[@]}" --hf-checkpoint "${MODEL:-Qwen/Qwen3-4B}" \
    --prompt-data "$(products train)" --apply-chat-template \
    --data-source-path "$here/curriculum.py:Curriculum" \
    --rollout-all-samples-process-path "$here/curriculum.py:learn" \
    --custom-rollout-log-function-path "$here/curriculum.py:log" \
    --rm-type last_number --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 1024 \
    --num-rollout 100 --lr 1e-6 --save-interval 20 --save-keep-last 2 \
    --train-backend megatron --tensor-model-parallel-size 2 --sequence-parallel \
    --use-dynamic-batch-size --max-tokens-per-gpu 9216 \
    --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 1 \
    --rollout-backend sglang --sglang-mem-fraction-static 0.8
