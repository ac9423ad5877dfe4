#!/usr/bin/env bash
# Qwen3-4B on one node of 8 GPUs, trainer and engines in turns on the same ones; all of gsm8k, math500 and AIME 2024
# every 20 steps. DATA: a JSONL file with prompt (messages) and label; SLIME_DATASETS: the folder of the sets.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$checkout/scripts/models/qwen3-4B.sh"

# A small model writes short answers, which are the default of prepare.py; a reasoning model needs room.
eval_config="$("$python" "$here/prepare.py" "$output_dir/data/eval_multi_task_gpu" --rows 2000 \
    --datasets "${SLIME_DATASETS:?the folder with gsm8k/, math500/ and aime/}" --max-response-len 16384)"

train eval_multi_task_gpu train.py "${MODEL_ARGS[@]}" --hf-checkpoint "${MODEL:-Qwen/Qwen3-4B}" \
    --prompt-data "${DATA:?a JSONL file with prompt and label}" --apply-chat-template --rollout-shuffle --rm-type math --math-answer any \
    --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 --num-rollout 200 \
    --eval-interval 20 --eval-config "$eval_config" --lr 1e-6 \
    --train-backend megatron --tensor-model-parallel-size 2 --sequence-parallel \
    --use-dynamic-batch-size --max-tokens-per-gpu 9216 \
    --actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 1 \
    --rollout-backend sglang --sglang-mem-fraction-static 0.7
