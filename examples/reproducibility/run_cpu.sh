#!/usr/bin/env bash
# The same run twice, and once more with a kill -9 in its middle and a resume, on two CPU cores with SmolLM2-135M: all
# losses and texts are equal bit for bit, or this ends with status 1. The reward is a coin, so that every step trains.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

same=(
    --hf-checkpoint "$(example_model)" --prompt-data "$(products train)" --rm-type random --rollout-shuffle
    --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 12 --num-rollout 4
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.1 --kl-loss-type low_var_kl
    --lr 1e-5 --use-dynamic-batch-size --max-tokens-per-gpu 1024 --train-dtype float32
    --seed 7 --rollout-seed 7 --deterministic
    --train-backend fsdp --rollout-backend embedded
)

train repro_first train.py "${same[@]}"
train repro_second train.py "${same[@]}"

# Snapshots after steps 1 and 3; killed while step 3 is under way, so that step 2 is made again.
snapshots="$output_dir/repro_resumed/checkpoints"
KILL_AFTER=2 train repro_resumed examples/reproducibility/killed.py "${same[@]}" --save-interval 2 --save "$snapshots"
train repro_resumed train.py "${same[@]}" --save-interval 2 --save "$snapshots" --save-keep-last 1 --load "$snapshots"

if [ "${DRY_RUN:-}" != 1 ]; then
    "$python" "$here/same.py" "$output_dir/repro_first" "$output_dir/repro_second" "$output_dir/repro_resumed"
fi
