#!/usr/bin/env bash
# Four updates of SmolLM2-135M as deltas: 269 MB of bf16 weights go to the engine once, then only what changed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

disk="$output_dir/delta_weights"
rm -rf "$disk"
train delta_weight_sync train.py --hf-checkpoint "$(example_model)" \
    --prompt-data "$(products train)" --apply-chat-template --rollout-shuffle --rm-type last_number \
    --rollout-batch-size 4 --n-samples-per-prompt 8 --rollout-max-response-len 16 --num-rollout 4 \
    --update-weight-mode delta --update-weight-transport disk --update-weight-disk-dir "$disk" \
    --custom-update-weight-post-write-path "$here/show.py:count" \
    --rollout-dtype bfloat16 --lr 1e-6 --train-backend fsdp --use-dynamic-batch-size --max-tokens-per-gpu 2048 "${engine[@]}"
if [ -z "${DRY_RUN:-}" ]; then
    "$python" "$here/show.py" "$output_dir/delta_weight_sync" "$disk"
fi
