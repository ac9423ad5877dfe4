#!/usr/bin/env bash
# The shop and its customers on a node of 8 GPUs: Qwen3-4B, trained by Megatron.
#
#   MODEL=/models/Qwen3-4B bash examples/tau_bench/run_gpu.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$checkout/scripts/models/qwen3-4B.sh"

data="$("$python" "$here/make_tasks.py" "$output_dir/data/tau_bench" --seed "${SEED:-1}")"

train tau_bench train.py \
    "${MODEL_ARGS[@]}" --hf-checkpoint "${MODEL:-Qwen/Qwen3-4B}" \
    --prompt-data "$data/train.jsonl" --rollout-shuffle --custom-rm-path "$here/generate_with_tools.py:score" \
    --custom-generate-function-path "$here/generate_with_tools.py:generate" --max-turns 12 --log-multi-turn \
    --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 --num-rollout 100 \
    --eval-prompt-data customers "$data/eval.jsonl" --eval-interval 10 --n-samples-per-eval-prompt 4 \
    --advantage-estimator grpo --eps-clip-high 0.28 --lr 1e-6 --weight-decay 0.1 \
    --save-interval 20 --save-keep-last 2 \
    --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
    --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --recompute-method uniform \
    --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216 --train-backend megatron \
    --rollout-backend sglang --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7
