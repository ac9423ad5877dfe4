#!/usr/bin/env bash
# GRPO on products, evaluated on three sets before and after, each with its own verifier, length and sampling.
# With SLIME_DATASETS the sets are gsm8k, math500 and aime; without, arithmetic that prepare.py makes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

options=()
if dataset math500/math500.jsonl >/dev/null; then options=(--datasets "$SLIME_DATASETS"); fi
eval_config="$("$python" "$here/prepare.py" "$output_dir/data/eval_multi_task" --rows "${ROWS:-6}" ${options[@]+"${options[@]}"})"

train eval_multi_task train.py --hf-checkpoint "$(example_model)" \
    --prompt-data "$(products train)" --apply-chat-template --rollout-shuffle --rm-type last_number \
    --rollout-batch-size 4 --n-samples-per-prompt 8 --rollout-max-response-len 16 --num-rollout 3 \
    --eval-interval 3 --eval-config "$eval_config" \
    --lr 1e-5 --train-backend fsdp --use-dynamic-batch-size --max-tokens-per-gpu 2048 "${engine[@]}"
