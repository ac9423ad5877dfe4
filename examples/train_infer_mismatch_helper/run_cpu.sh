#!/usr/bin/env bash
# One engine in bfloat16 generates three rollouts; then a float32 trainer trains on the same samples five times, each time
# with another correction. In the second and third step the samples are also one and two updates old.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

flags=(
    --hf-checkpoint "$(example_model)" --prompt-data "$(products train)" --apply-chat-template --rm-type last_number
    --rollout-batch-size 4 --n-samples-per-prompt 8 --rollout-max-response-len 16 --num-rollout 3
    --lr 1e-5 --train-backend fsdp --use-dynamic-batch-size --max-tokens-per-gpu 2048 --train-dtype float32
)
samples="$output_dir/data/mismatch/{rollout_id}.pt"
mkdir -p "${samples%/*}"
train mismatch_samples train.py "${flags[@]}" --rollout-dtype bfloat16 "${engine[@]}" \
    --debug-rollout-only --save-debug-rollout-data "$samples"

names=(measure tis icepop mis own)
for name in "${names[@]}"; do
    train "mismatch_$name" train.py "${flags[@]}" --load-debug-rollout-data "$samples" \
        --custom-config-path "$here/$name.yaml"
done
if [ -z "${DRY_RUN:-}" ]; then
    "$python" "$here/table.py" "$output_dir" "${names[@]}"
fi
