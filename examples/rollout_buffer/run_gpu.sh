#!/usr/bin/env bash
# The same server beside Qwen3-4B on one node of 8 GPUs: 4 train (Megatron), 4 generate (SGLang).
# For a task of your own put a module into generators/ and name its TASK_TYPE; DATA: its prompts.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$checkout/scripts/models/qwen3-4B.sh"

url="http://127.0.0.1:${PORT:-8889}"
config="$output_dir/rollout_buffer_gpu.yaml"
key="$output_dir/rollout_buffer_gpu.key"
printf 'buffer_server_url: %s\nbuffer_server_key_file: %s\n' "$url" "$key" >"$config"
printf 'buffer_server_task: %s\nbuffer_server_ahead: 32\n' "${TASK_TYPE:-products}" >>"$config"
start_server rollout_buffer_server "$url/health" "$python" "$here/server.py" --port "${url##*:}" --key-file "$key"

train rollout_buffer_gpu train.py "${MODEL_ARGS[@]}" --hf-checkpoint "${MODEL:-Qwen/Qwen3-4B}" \
    --prompt-data "${DATA:-$(products train)}" --apply-chat-template --rollout-shuffle --rm-type last_number \
    --rollout-function-path "$here/rollout.py:generate_rollout" --custom-config-path "$config" \
    --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 1024 --num-rollout 200 \
    --use-tis --lr 1e-6 \
    --train-backend megatron --tensor-model-parallel-size 2 --sequence-parallel \
    --use-dynamic-batch-size --max-tokens-per-gpu 9216 \
    --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 1 \
    --rollout-backend sglang --sglang-mem-fraction-static 0.8
