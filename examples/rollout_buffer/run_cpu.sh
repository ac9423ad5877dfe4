#!/usr/bin/env bash
# SmolLM2-135M on samples of a server of its own, which works one step ahead of training.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

url="http://127.0.0.1:$(free_port)"
config="$output_dir/rollout_buffer.yaml"
key="$output_dir/rollout_buffer.key"
printf 'buffer_server_url: %s\nbuffer_server_key_file: %s\n' "$url" "$key" >"$config"
printf 'buffer_server_task: products\nbuffer_server_ahead: 4\n' >>"$config"
start_server rollout_buffer_server "$url/health" "$python" "$here/server.py" --port "${url##*:}" --key-file "$key"

train rollout_buffer train.py --hf-checkpoint "$(example_model)" \
    --prompt-data "$(products train)" --apply-chat-template --rollout-shuffle --rm-type last_number \
    --rollout-function-path "$here/rollout.py:generate_rollout" --custom-config-path "$config" \
    --rollout-batch-size 4 --n-samples-per-prompt 8 --rollout-max-response-len 16 --num-rollout 4 \
    --use-tis --lr 1e-5 --train-backend fsdp --use-dynamic-batch-size --max-tokens-per-gpu 2048 "${engine[@]}"
