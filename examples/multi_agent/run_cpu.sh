#!/usr/bin/env bash
# Two solvers, two rewriters and a selector for each prompt, on two CPU cores: products of digits with SmolLM2-135M.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

train multi_agent train.py \
    --hf-checkpoint "$(example_model)" --prompt-data "$(products train)" --rollout-shuffle \
    --custom-generate-function-path "$here/agents.py:generate" --rm-type last_number \
    --custom-reward-post-process-path "$here/agents.py:by_role" \
    --custom-rollout-log-function-path "$here/agents.py:log_roles" \
    --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 16 \
    --num-rollout "${NUM_ROLLOUT:-8}" --eval-interval "${NUM_ROLLOUT:-8}" --eval-prompt-data products "$(products eval)" \
    --advantage-estimator grpo --lr 1e-5 --use-dynamic-batch-size --max-tokens-per-gpu 2048 --train-dtype float32 \
    --train-backend fsdp "${engine[@]}"
