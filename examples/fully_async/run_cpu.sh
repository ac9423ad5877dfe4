#!/usr/bin/env bash
# Six steps of SmolLM2-135M while generation goes on: groups live through weight updates, and no trained token is older
# than two updates.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

train fully_async train_async.py --hf-checkpoint "$(example_model)" \
    --prompt-data "$(products train)" --apply-chat-template --rollout-shuffle --rm-type last_number \
    --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async \
    --async-buffer-size 2 --update-weights-interval 1 --max-weight-staleness 2 \
    --rollout-batch-size 4 --n-samples-per-prompt 8 --rollout-max-response-len 24 --num-rollout "${STEPS:-6}" \
    --lr 1e-5 --train-backend fsdp --use-dynamic-batch-size --max-tokens-per-gpu 2048 "${engine[@]}"
if [ -z "${DRY_RUN:-}" ]; then
    "$python" "$here/staleness.py" "$output_dir/fully_async"
fi
