#!/usr/bin/env bash
# On-policy distillation on two CPU cores, with the teacher behind an engine and with the teacher in the trainer.
# Student: SmolLM2-135M. Teacher: the same after a minute of supervised fine-tuning on worked products.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model="$(example_model)"
data="$(products train)" teacher="$output_dir/opd_teacher/hf"
transcripts="$("$python" "$here/../sft_then_rl/transcripts.py" "$data" "$output_dir/data/products_transcripts.jsonl")"
common=(
    --hf-checkpoint "$model" --rollout-shuffle --use-dynamic-batch-size --max-tokens-per-gpu 2048
    --train-dtype float32 --train-backend fsdp
)

if [ ! -e "$teacher/config.json" ]; then  # that of an earlier run will do
    train opd_teacher train.py "${common[@]}" --debug-train-only \
        --prompt-data "$transcripts" --input-key messages \
        --rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss \
        --disable-compute-advantages-and-returns --rollout-batch-size 13 --num-rollout 10 --lr 2e-5 \
        --save "$output_dir/opd_teacher/checkpoints" --save-interval 10 --no-save-optim --save-hf "$teacher"
fi
if [ "${DRY_RUN:-}" = 1 ]; then teacher="$model"; fi

student=(
    "${common[@]}" "${engine[@]}" --prompt-data "$data"
    --custom-rm-path slime.rollout.on_policy_distillation.reward_func
    --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards
    --rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-max-response-len 16 --num-rollout "${NUM_ROLLOUT:-5}"
    --lr 3e-5 --use-opd --opd-kl-coef 1.0
)

port="$(free_port)"
start_server teacher "http://127.0.0.1:$port/health" \
    "$python" -m slime.engines.embedded.server --model-path "$teacher" --port "$port" --threads 1 --deterministic
train opd_engine train.py "${student[@]}" --opd-type sglang --rm-url "http://127.0.0.1:$port/generate"
stop_servers
train opd_trainer train.py "${student[@]}" --opd-type megatron --opd-teacher-load "$teacher"

if [ "${DRY_RUN:-}" != 1 ]; then
    "$python" "$here/compare.py" "$output_dir/opd_engine" "$output_dir/opd_trainer"
fi
