#!/usr/bin/env bash
# Supervised fine-tuning on transcripts, then GRPO from its checkpoint, on two CPU cores: products with SmolLM2-135M.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model="$(example_model)"
data="$(products train)" held_out="$(products eval)"
transcripts="$("$python" "$here/transcripts.py" "$data" "$output_dir/data/products_transcripts.jsonl")"
checkpoints="$output_dir/sft_then_rl_sft/checkpoints"
mkdir -p "$checkpoints"
both=(
    --hf-checkpoint "$model" --rm-type last_number --rollout-shuffle
    --eval-prompt-data products "$held_out" --rollout-max-response-len 20 --n-samples-per-eval-prompt 2
    --use-dynamic-batch-size --max-tokens-per-gpu 2048 --train-dtype float32 --train-backend fsdp "${engine[@]}"
)

# Each conversation is trained on once. There is nothing to generate, so held-out products are evaluated by the usual rollout.
train sft_then_rl_sft train.py "${both[@]}" \
    --prompt-data "$transcripts" --input-key messages --eval-input-key prompt --eval-label-key label \
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss \
    --disable-compute-advantages-and-returns --eval-function-path slime.rollout.sglang_rollout.generate_rollout \
    --rollout-batch-size 13 --num-rollout 5 --eval-interval 5 --lr 1e-5 \
    --save "$checkpoints" --save-interval 5 --no-save-optim

# --finetune takes the weights alone: optimizer, data source and counters begin anew.
train sft_then_rl train.py "${both[@]}" \
    --load "$checkpoints" --finetune \
    --prompt-data "$data" --rollout-batch-size 6 --n-samples-per-prompt 8 \
    --num-rollout "${NUM_ROLLOUT:-6}" --eval-interval "${NUM_ROLLOUT:-6}" --advantage-estimator grpo --lr 1e-5
