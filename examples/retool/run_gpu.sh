#!/usr/bin/env bash
# ReTool on a node of 8 GPUs: Qwen3-4B, trained by Megatron, Python in the sandbox of this machine.
#
#   MODEL=/models/Qwen3-4B SFT_DATA=retool_sft.jsonl DATA=dapo-math-17k.jsonl bash examples/retool/run_gpu.sh
#
# SFT_DATA: rows with "messages" in this example's format (without it: no warm start); DATA: prompt (messages), label.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$checkout/scripts/models/qwen3-4B.sh"

data="${DATA:?a JSONL file of math problems: prompt (messages), label}"
checkpoints="$output_dir/retool_sft/checkpoints"
both=(
    "${MODEL_ARGS[@]}" --hf-checkpoint "${MODEL:-Qwen/Qwen3-4B}" --rollout-shuffle
    --actor-num-nodes 1 --actor-num-gpus-per-node 8
    --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --recompute-method uniform
    --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 18432
    --weight-decay 0.1 --train-backend megatron
)
start=()
if [ -n "${SFT_DATA:-}" ]; then
    mkdir -p "$checkpoints"
    train retool_sft train.py "${both[@]}" \
        --prompt-data "$SFT_DATA" --input-key messages --loss-mask-type qwen3 \
        --rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss \
        --calculate-per-token-loss --disable-compute-advantages-and-returns --debug-train-only \
        --rollout-batch-size 128 --num-epoch 3 --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine \
        --lr-warmup-fraction 0.1 --save "$checkpoints" --save-interval 200 --save-keep-last 1
    start=(--load "$checkpoints" --finetune)
fi

train retool train.py "${both[@]}" ${start[@]+"${start[@]}"} \
    --prompt-data "$data" --custom-rm-path "$here/generate_with_retool.py:reward" --colocate \
    --custom-generate-function-path "$here/generate_with_retool.py:generate" --max-turns 8 --log-multi-turn \
    --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 16384 --num-rollout 300 \
    --advantage-estimator grpo --eps-clip-high 0.28 --lr 1e-6 --save-interval 20 --save-keep-last 2 \
    --rollout-backend sglang --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7
