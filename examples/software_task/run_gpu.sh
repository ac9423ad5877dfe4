#!/usr/bin/env bash
# Repositories with a bug on a node of 8 GPUs: Qwen3-4B, trained by Megatron, commands in the sandbox of this machine.
#
#   MODEL=/models/Qwen3-4B TASKS=/data/tasks bash examples/software_task/run_gpu.sh
#
# TASKS: a folder of tasks in Harbor's format (without it: those of make_tasks.py).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$checkout/scripts/models/qwen3-4B.sh"

tasks="${TASKS:-$("$python" "$here/make_tasks.py" "$output_dir/data/software_task")}"
train software_task train.py "${MODEL_ARGS[@]}" --hf-checkpoint "${MODEL:-Qwen/Qwen3-4B}" \
    --environment "harbor:$tasks" --rollout-shuffle --max-turns 30 --log-multi-turn --colocate \
    --actor-num-nodes 1 --actor-num-gpus-per-node 8 \
    --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --recompute-method uniform \
    --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 18432 \
    --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 16384 --num-rollout 300 \
    --advantage-estimator grpo --eps-clip-high 0.28 --lr 1e-6 --weight-decay 0.1 \
    --save-interval 20 --save-keep-last 2 --train-backend megatron \
    --rollout-backend sglang --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7
