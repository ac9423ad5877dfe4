#!/usr/bin/env bash
# Images over several turns on a node of 8 GPUs: Qwen2.5-VL-3B-Instruct on Geometry3K. An answer that math-verify finds
# wrong is followed by the figure at twice the size; the second answer is worth half.
#
#   MODEL=/models/Qwen2.5-VL-3B-Instruct DATA=/data/geometry3k/train.parquet bash examples/geo3k_vlm_multi_turn/run_gpu.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

train geo3k_vlm_multi_turn train.py \
    --hf-checkpoint "${MODEL:-Qwen/Qwen2.5-VL-3B-Instruct}" \
    --prompt-data "${DATA:?the training file of geometry3k (columns images, problem, answer)}" \
    --input-key problem --label-key answer --multimodal-keys '{"image": "images"}' --rollout-shuffle \
    --custom-generate-function-path "$here/second_look.py:generate" --max-turns 3 \
    --custom-rm-path "$here/second_look.py:score" --rm-type math --math-answer any \
    --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
    --rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-response-len 6144 --rollout-max-prompt-len 2048 \
    --num-rollout 160 --save-interval 20 --save-keep-last 2 --log-multi-turn \
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl --eps-clip-high 0.28 \
    --lr 1e-6 --use-dynamic-batch-size --max-tokens-per-gpu 8192 --gradient-checkpointing \
    --train-backend fsdp --rollout-backend sglang --sglang-mem-fraction-static 0.6
