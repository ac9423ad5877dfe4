#!/usr/bin/env bash
# GRPO on images on a node of 8 GPUs: Qwen2.5-VL-3B-Instruct on Geometry3K.
#
#   MODEL=/models/Qwen2.5-VL-3B-Instruct DATA=/data/geometry3k/train.parquet bash examples/geo3k_vlm/run_gpu.sh
#
# DATA: the training file of the data set hiyouga/geometry3k (columns images, problem, answer; the problem has <image>
# where the figure belongs); EVAL_DATA: its test file. Image-text models train with FSDP: Megatron has no vision part here.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

train geo3k_vlm train.py \
    --hf-checkpoint "${MODEL:-Qwen/Qwen2.5-VL-3B-Instruct}" \
    --prompt-data "${DATA:?the training file of geometry3k (columns images, problem, answer)}" \
    --input-key problem --label-key answer --multimodal-keys '{"image": "images"}' --rollout-shuffle \
    --rm-type math --math-answer any \
    --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
    --rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-response-len 2048 --rollout-max-prompt-len 2048 \
    --num-epoch 5 --eval-interval 20 --eval-prompt-data geo3k "${EVAL_DATA:-$DATA@[:64]}" --eval-max-response-len 4096 \
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl --eps-clip-high 0.28 \
    --lr 1e-6 --use-dynamic-batch-size --max-tokens-per-gpu 8192 --gradient-checkpointing \
    --save-interval 20 --save-keep-last 2 \
    --train-backend fsdp --rollout-backend sglang --sglang-mem-fraction-static 0.6
