#!/usr/bin/env bash
# A Python sandbox as a tool, on two CPU cores: a minute of fine-tuning on transcripts, then GRPO, with SmolLM2-135M.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model="$(example_model)"
data="$("$python" "$here/make_problems.py" "$output_dir/data/retool" --seed "${SEED:-1}")"
checkpoints="$output_dir/retool_sft/checkpoints"
mkdir -p "$checkpoints"
both=(
    --hf-checkpoint "$model" --rollout-shuffle --use-dynamic-batch-size --max-tokens-per-gpu 2048
    --train-dtype float32 --train-backend fsdp "${engine[@]}"
)

# Half of the transcripts call the tool, the other half guess: after this the model does either.
train retool_sft train.py "${both[@]}" \
    --prompt-data "$data/transcripts.jsonl" --input-key messages \
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss \
    --disable-compute-advantages-and-returns --debug-train-only \
    --rollout-batch-size 16 --num-rollout 8 --lr 5e-5 \
    --save "$checkpoints" --save-interval 8 --no-save-optim

train retool train.py "${both[@]}" \
    --load "$checkpoints" --finetune \
    --prompt-data "$data/train.jsonl" --custom-rm-path "$here/generate_with_retool.py:reward" \
    --custom-generate-function-path "$here/generate_with_retool.py:generate" --max-turns 3 --log-multi-turn \
    --rollout-batch-size 8 --n-samples-per-prompt 6 --rollout-max-response-len 96 \
    --num-rollout "${NUM_ROLLOUT:-8}" --eval-interval "${NUM_ROLLOUT:-8}" \
    --eval-prompt-data arithmetic "$data/eval.jsonl" --n-samples-per-eval-prompt 2 \
    --advantage-estimator grpo --lr 1e-5
