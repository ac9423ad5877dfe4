#!/usr/bin/env bash
# GRPO on images, on two CPU cores: a tiny vision-language model learns to measure squares. Minutes; fetches nothing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

data="$output_dir/data/geometry"
"$python" "$here/geometry.py" "$data" --seed "${SEED:-1}" --architecture "${ARCHITECTURE:-llava}" ${MODEL:+--no-model}

train geo3k_vlm train.py \
    --hf-checkpoint "${MODEL:-$data/model}" \
    --prompt-data "$data/train.jsonl" --multimodal-keys '{"image": "images"}' --rollout-shuffle \
    --custom-rm-path "$here/geometry.py:score" \
    --rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 2 \
    --num-rollout "${NUM_ROLLOUT:-20}" --eval-interval "${NUM_ROLLOUT:-20}" --eval-prompt-data figures "$data/eval.jsonl" \
    --advantage-estimator grpo --lr 3e-4 --use-dynamic-batch-size --max-tokens-per-gpu 4096 \
    --train-backend fsdp "${engine[@]}"
