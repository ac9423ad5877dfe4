#!/usr/bin/env bash
# Qwen3-30B-A3B on two nodes of 8 GPUs: the first 8 train (Megatron), the other 8 generate (SGLang).
#
#   on both     export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...the same secret...
#   the head    ray start --head --node-ip-address $MASTER_ADDR --port 6379 --num-gpus 8 --dashboard-host 0.0.0.0
#   the other   ray start --address $MASTER_ADDR:6379 --num-gpus 8
#   the head    MASTER_ADDR=... DATA=... bash examples/multi_node/run_gpu.sh
#
# Checkout, environment, model, data and OUTPUT_DIR must be at the same path on both (a shared disk).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$checkout/scripts/models/qwen3-30B-A3B.sh"

environment="{\"env_vars\": {\"PYTHONPATH\": \"$checkout\", \"NCCL_SOCKET_IFNAME\": \"${IFNAME:-eth0}\"}}"
launcher=("$python" -m ray.scripts.scripts job submit --address "http://${MASTER_ADDR:-127.0.0.1}:8265"
    --runtime-env-json "$environment" --)
train multi_node_gpu train.py "${MODEL_ARGS[@]}" --hf-checkpoint "${MODEL:-Qwen/Qwen3-30B-A3B}" \
    --prompt-data "${DATA:?a JSONL file with prompt and label}" --apply-chat-template --rollout-shuffle --rm-type math --math-answer any \
    --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 --num-rollout 200 \
    --save-interval 20 --lr 1e-6 \
    --train-backend megatron --tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
    --use-dynamic-batch-size --max-tokens-per-gpu 16384 \
    --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 4 \
    --rollout-backend sglang --sglang-mem-fraction-static 0.8
