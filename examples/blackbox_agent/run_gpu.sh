#!/usr/bin/env bash
# The same agent with Qwen3-4B on one node of 8 GPUs: 4 train (Megatron), 4 generate (SGLang).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$checkout/scripts/models/qwen3-4B.sh"

train blackbox_agent_gpu train.py "${MODEL_ARGS[@]}" --hf-checkpoint "${MODEL:-Qwen/Qwen3-4B}" \
    --prompt-data "$(products train)" --rollout-shuffle \
    --agent-function-path "$here/agent.py:run" --agent-timeout 600 --agent-tool-parser hermes \
    --apply-chat-template-kwargs '{"enable_thinking": false}' \
    --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 2048 \
    --num-rollout 100 --lr 1e-6 --save-interval 20 --save-keep-last 2 \
    --train-backend megatron --tensor-model-parallel-size 2 --sequence-parallel \
    --use-dynamic-batch-size --max-tokens-per-gpu 9216 \
    --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 1 \
    --rollout-backend sglang --sglang-mem-fraction-static 0.8
