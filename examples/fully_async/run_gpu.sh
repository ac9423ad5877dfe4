#!/usr/bin/env bash
# Qwen3-4B on one node of 8 GPUs: 4 train (Megatron), 4 generate (SGLang) without a pause. DATA: a JSONL file with prompt
# (messages) and label. The prefill delayer of SGLang starts new requests together, so that they do not interrupt the others
# one by one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$checkout/scripts/models/qwen3-4B.sh"

train fully_async_gpu train_async.py "${MODEL_ARGS[@]}" --hf-checkpoint "${MODEL:-Qwen/Qwen3-4B}" \
    --prompt-data "${DATA:?a JSONL file with prompt and label}" --apply-chat-template --rollout-shuffle --rm-type math --math-answer any \
    --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async \
    --async-buffer-size 4 --update-weights-interval 2 --max-weight-staleness 4 \
    --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 --num-rollout 200 \
    --eps-clip 0.2 --eps-clip-high 0.28 --lr 1e-6 --save-interval 20 \
    --train-backend megatron --tensor-model-parallel-size 2 --sequence-parallel \
    --use-dynamic-batch-size --max-tokens-per-gpu 9216 \
    --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 1 \
    --rollout-backend sglang --sglang-mem-fraction-static 0.8 \
    --sglang-enable-prefill-delayer --sglang-prefill-delayer-queue-min-ratio 0.1
