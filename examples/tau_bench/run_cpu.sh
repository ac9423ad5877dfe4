#!/usr/bin/env bash
# Tools that change a shop's orders and a simulated customer, on two CPU cores: fine-tuning, then GRPO, SmolLM2-135M.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model="$(example_model)"
data="$("$python" "$here/make_tasks.py" "$output_dir/data/tau_bench" --seed "${SEED:-1}")"
checkpoints="$output_dir/tau_bench_sft/checkpoints"
mkdir -p "$checkpoints"
both=(
    --hf-checkpoint "$model" --rollout-shuffle --use-dynamic-batch-size --max-tokens-per-gpu 2048
    --train-dtype float32 --train-backend fsdp "${engine[@]}"
)

# In two of three transcripts the assistant looks at an order before it changes it.
train tau_bench_sft train.py "${both[@]}" \
    --prompt-data "$data/transcripts.jsonl" --input-key messages \
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss \
    --disable-compute-advantages-and-returns --debug-train-only \
    --rollout-batch-size 16 --num-rollout 12 --lr 5e-5 \
    --save "$checkpoints" --save-interval 12 --no-save-optim

train tau_bench train.py "${both[@]}" \
    --load "$checkpoints" --finetune \
    --prompt-data "$data/train.jsonl" --custom-rm-path "$here/generate_with_tools.py:score" \
    --custom-generate-function-path "$here/generate_with_tools.py:generate" --max-turns 6 --log-multi-turn \
    --rollout-batch-size 8 --n-samples-per-prompt 6 --rollout-max-response-len 288 \
    --num-rollout "${NUM_ROLLOUT:-8}" --eval-interval "${NUM_ROLLOUT:-8}" \
    --eval-prompt-data customers "$data/eval.jsonl" --n-samples-per-eval-prompt 2 \
    --advantage-estimator grpo --lr 5e-6
