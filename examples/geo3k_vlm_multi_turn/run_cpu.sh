#!/usr/bin/env bash
# Images over several turns, on two CPU cores: a wrong answer gets a hint and a second look. Minutes; fetches nothing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

data="$output_dir/data/geometry"
"$python" "$here/../geo3k_vlm/geometry.py" "$data" --seed "${SEED:-1}" --architecture "${ARCHITECTURE:-llava}" ${MODEL:+--no-model}

train geo3k_vlm_multi_turn train.py \
    --hf-checkpoint "${MODEL:-$data/model}" \
    --prompt-data "$data/train.jsonl" --multimodal-keys '{"image": "images"}' --rollout-shuffle \
    --custom-generate-function-path "$here/second_look.py:generate" --max-turns 2 \
    --custom-rm-path "$here/second_look.py:score" --rm-type last_number \
    --rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 64 \
    --custom-config-path "$here/answer.yaml" \
    --num-rollout "${NUM_ROLLOUT:-20}" --eval-interval "${NUM_ROLLOUT:-20}" --eval-prompt-data figures "$data/eval.jsonl" \
    --advantage-estimator grpo --lr 3e-4 --use-dynamic-batch-size --max-tokens-per-gpu 4096 --log-multi-turn \
    --train-backend fsdp "${engine[@]}"
