#!/usr/bin/env bash
# Qwen3-30B-A3B on 8 GPUs, where the gap is largest: a mixture of experts, trained by Megatron, sampled by SGLang.
# CORRECTION=measure|tis|icepop|mis|own; DATA: a JSONL file with prompt (messages) and label.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$checkout/scripts/models/qwen3-30B-A3B.sh"
correction="${CORRECTION:-mis}"

train "mismatch_gpu_$correction" train.py "${MODEL_ARGS[@]}" --hf-checkpoint "${MODEL:-Qwen/Qwen3-30B-A3B}" \
    --prompt-data "${DATA:?a JSONL file with prompt and label}" --apply-chat-template --rollout-shuffle --rm-type math --math-answer any \
    --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 --num-rollout 200 \
    --custom-config-path "$here/$correction.yaml" --lr 1e-6 --eps-clip 0.2 --eps-clip-high 0.28 \
    --train-backend megatron --tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
    --use-dynamic-batch-size --max-tokens-per-gpu 16384 \
    --actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 4 \
    --rollout-backend sglang --sglang-mem-fraction-static 0.6
