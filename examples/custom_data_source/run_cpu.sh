#!/usr/bin/env bash
# A curriculum on SmolLM2-135M: once in one piece, once stopped after two of four steps and resumed; then compared.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

flags=(
    --hf-checkpoint "$(example_model)" --prompt-data "$(products train)" --apply-chat-template
    --data-source-path "$here/curriculum.py:Curriculum"
    --rollout-all-samples-process-path "$here/curriculum.py:learn"
    --custom-rollout-log-function-path "$here/curriculum.py:log"
    --rm-type last_number --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 16
    --lr 2e-5 --train-backend fsdp --use-dynamic-batch-size --max-tokens-per-gpu 2048 \
    --save-interval 2 --save-keep-last 1 "${engine[@]}"
)
train custom_data_source train.py "${flags[@]}" --num-rollout 4
train custom_data_source_resumed train.py "${flags[@]}" --num-rollout 2
# Its folder is found by --load; without the weights and the optimizer of the snapshot nothing would be the same.
train custom_data_source_resumed train.py "${flags[@]}" --num-rollout 4 \
    --load "$output_dir/custom_data_source_resumed/checkpoints"
if [ -z "${DRY_RUN:-}" ]; then
    "$python" "$here/compare.py" "$output_dir/custom_data_source" "$output_dir/custom_data_source_resumed"
fi
