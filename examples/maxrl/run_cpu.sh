#!/usr/bin/env bash
# MaxRL, an estimator in a file of the user, on two CPU cores with SmolLM2-135M.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

train maxrl train.py \
    --advantage-estimator "$here/maxrl.py:MaxRL" \
    --hf-checkpoint "$(example_model)" --prompt-data "$(products train)" --apply-chat-template --rollout-shuffle \
    --rm-type last_number --rollout-batch-size 4 --n-samples-per-prompt 8 --rollout-max-response-len 24 \
    --num-rollout "${NUM_ROLLOUT:-4}" --lr 1e-5 --use-dynamic-batch-size --max-tokens-per-gpu 2048 \
    --train-dtype float32 --train-backend fsdp "${engine[@]}"
