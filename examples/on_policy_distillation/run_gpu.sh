#!/usr/bin/env bash
# On-policy distillation on a node of 8 GPUs: Qwen3-32B, served by SGLang on two of them, teaches Qwen3-4B-Base, which
# Megatron trains on four.
#
#   MODEL=/models/Qwen3-4B-Base TEACHER=/models/Qwen3-32B DATA=dapo-math-17k.jsonl \
#       bash examples/on_policy_distillation/run_gpu.sh
#
# Teacher and student must have one tokenizer. A teacher of the student's own shape can sit in the trainer instead:
# --opd-type megatron --opd-teacher-load TEACHER in place of --opd-type and --rm-url.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$checkout/scripts/models/qwen3-4B.sh"

port="$(free_port)"
CUDA_VISIBLE_DEVICES=6,7 SERVER_SECONDS=900 start_server teacher "http://127.0.0.1:$port/health" \
    "$python" -m sglang.launch_server --model-path "${TEACHER:-Qwen/Qwen3-32B}" --tp-size 2 --port "$port" \
    --mem-fraction-static 0.7 --chunked-prefill-size 4096

export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5
train on_policy_distillation train.py "${MODEL_ARGS[@]}" \
    --hf-checkpoint "${MODEL:-Qwen/Qwen3-4B-Base}" \
    --prompt-data "${DATA:?a JSONL file of prompts (messages)}" --rollout-shuffle \
    --use-opd --opd-type sglang --opd-kl-coef 1.0 --rm-url "http://127.0.0.1:$port/generate" \
    --custom-rm-path slime.rollout.on_policy_distillation.reward_func \
    --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards \
    --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 2 \
    --rollout-batch-size 64 --n-samples-per-prompt 4 --rollout-max-response-len 8192 --num-rollout 300 \
    --lr 1e-6 --weight-decay 0.1 --adam-beta2 0.98 --save-interval 20 --save-keep-last 2 \
    --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --recompute-method uniform \
    --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 16384 \
    --train-backend megatron --rollout-backend sglang --sglang-mem-fraction-static 0.8
