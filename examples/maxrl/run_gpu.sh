#!/usr/bin/env bash
# MaxRL with Qwen3-4B on one node of 8 GPUs, which the trainer (Megatron) and the engines (SGLang) share.
#
#   MODEL=/models/Qwen3-4B DATA=dapo-math-17k.jsonl bash examples/maxrl/run_gpu.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$checkout/scripts/models/qwen3-4B.sh"

train maxrl_gpu train.py "${MODEL_ARGS[@]}" --hf-checkpoint "${MODEL:-Qwen/Qwen3-4B}" \
    --advantage-estimator "$here/maxrl.py:MaxRL" \
    --prompt-data "${DATA:?a JSONL file of math problems: prompt (messages), label}" --rm-type deepscaler \
    --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
    --rollout-batch-size 32 --n-samples-per-prompt 16 --rollout-max-response-len 4096 --num-rollout 200 \
    --lr 1e-6 --eps-clip-high 0.28 --save-interval 20 --save-keep-last 2 \
    --tensor-model-parallel-size 2 --sequence-parallel --use-dynamic-batch-size --max-tokens-per-gpu 16384 \
    --train-backend megatron --rollout-backend sglang --rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.7
