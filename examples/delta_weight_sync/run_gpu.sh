#!/usr/bin/env bash
# Qwen3-4B on one node of 8 GPUs, trainer and engines apart; with engines on other machines DISK is a shared folder.
# DATA: a JSONL file with prompt (messages) and label.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$checkout/scripts/models/qwen3-4B.sh"

train delta_weight_sync_gpu train.py "${MODEL_ARGS[@]}" --hf-checkpoint "${MODEL:-Qwen/Qwen3-4B}" \
    --prompt-data "${DATA:?a JSONL file with prompt and label}" --apply-chat-template --rollout-shuffle --rm-type math --math-answer any \
    --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 --num-rollout 200 --lr 1e-6 \
    --update-weight-mode delta --update-weight-transport disk --update-weight-disk-dir "${DISK:-$output_dir/delta_weights_gpu}" \
    --custom-update-weight-post-write-path "$here/show.py:count" \
    --train-backend megatron --tensor-model-parallel-size 2 --sequence-parallel \
    --use-dynamic-batch-size --max-tokens-per-gpu 9216 \
    --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 1 \
    --rollout-backend sglang --sglang-mem-fraction-static 0.8
