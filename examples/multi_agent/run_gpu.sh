#!/usr/bin/env bash
# Solvers, rewriters and a selector on a node of 8 GPUs: Qwen3-4B on mathematics, trained by Megatron.
#
#   MODEL=/models/Qwen3-4B DATA=dapo-math-17k.jsonl bash examples/multi_agent/run_gpu.sh
#
# DATA: rows with a prompt of messages and a label. For each prompt 4 rollouts of 5 samples.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$checkout/scripts/models/qwen3-4B.sh"

train multi_agent train.py "${MODEL_ARGS[@]}" \
    --hf-checkpoint "${MODEL:-Qwen/Qwen3-4B}" \
    --prompt-data "${DATA:?a JSONL file of math problems: prompt (messages), label}" --rollout-shuffle \
    --custom-generate-function-path "$here/agents.py:generate" --rm-type deepscaler \
    --custom-reward-post-process-path "$here/agents.py:by_role" \
    --custom-rollout-log-function-path "$here/agents.py:log_roles" \
    --apply-chat-template-kwargs '{"enable_thinking": false}' \
    --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
    --rollout-batch-size 32 --n-samples-per-prompt 4 --rollout-max-response-len 4096 \
    --num-rollout 300 --save-interval 20 --save-keep-last 2 \
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl --eps-clip-high 0.28 \
    --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.98 \
    --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --recompute-method uniform \
    --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 16384 \
    --train-backend megatron --rollout-backend sglang --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7
