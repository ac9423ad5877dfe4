#!/usr/bin/env bash
# Repositories with a bug, a shell in the sandbox, their tests as the reward: SmolLM2-135M on two CPU cores.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

tasks="$("$python" "$here/make_tasks.py" "$output_dir/data/software_task")"
train software_task train.py --hf-checkpoint "$(example_model)" \
    --environment "harbor:$tasks?seconds=10" --rollout-shuffle --max-turns 4 --log-multi-turn \
    --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 512 \
    --num-rollout "${NUM_ROLLOUT:-2}" --advantage-estimator grpo --lr 1e-5 --train-backend fsdp \
    --use-dynamic-batch-size --max-tokens-per-gpu 4096 "${engine[@]}"
