#!/usr/bin/env bash
# A reward model on a node of 8 GPUs: Skywork-Reward-V2-Qwen3-4B behind an SGLang server of its own scores Qwen3-4B, which
# Megatron trains on four GPUs.
#
#   MODEL=/models/Qwen3-4B REWARD_MODEL=/models/Skywork-Reward-V2-Qwen3-4B DATA=prompts.jsonl \
#       bash examples/reward_model/run_gpu.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$checkout/scripts/models/qwen3-4B.sh"

reward_model="${REWARD_MODEL:-Skywork/Skywork-Reward-V2-Qwen3-4B}"
port="$(free_port)"
CUDA_VISIBLE_DEVICES=7 SERVER_SECONDS=900 start_server reward_model "http://127.0.0.1:$port/health" \
    "$python" -m sglang.launch_server --model-path "$reward_model" --is-embedding --port "$port"

export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6
train reward_model train.py "${MODEL_ARGS[@]}" \
    --hf-checkpoint "${MODEL:-Qwen/Qwen3-4B}" \
    --prompt-data "${DATA:?a JSONL file of prompts (messages)}" --rollout-shuffle \
    --custom-rm-path slime.rollout.rm_hub.sglang_scorer.score_group --group-rm \
    --rm-url "http://127.0.0.1:$port/classify" --rm-model-path "$reward_model" --reward-timeout 120 \
    --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 3 \
    --rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-response-len 2048 --num-rollout 200 \
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl \
    --lr 1e-6 --weight-decay 0.1 --adam-beta2 0.98 --save-interval 20 --save-keep-last 2 \
    --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --recompute-method uniform \
    --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 16384 \
    --train-backend megatron --rollout-backend sglang --sglang-mem-fraction-static 0.8
