#!/usr/bin/env bash
# The same run twice on a node of 8 GPUs: Qwen3-4B, trained by Megatron, with SGLang's deterministic kernels.
#
#   MODEL=/models/Qwen3-4B DATA=dapo-math-17k.jsonl bash examples/reproducibility/run_gpu.sh
#
# --deterministic makes trainer and engines repeat themselves; SGLang's seeds are best effort (docs/en/backends.md), so the
# last line may name the step from which on the runs differ.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$checkout/scripts/models/qwen3-4B.sh"

same=(
    "${MODEL_ARGS[@]}" --hf-checkpoint "${MODEL:-Qwen/Qwen3-4B}"
    --prompt-data "${DATA:?a JSONL file of math problems: prompt (messages), label}" --rm-type deepscaler
    --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate
    --rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 2048 --num-rollout 10
    --advantage-estimator grpo --lr 1e-6 --seed 7 --rollout-seed 7 --deterministic
    --tensor-model-parallel-size 2 --sequence-parallel --use-dynamic-batch-size --max-tokens-per-gpu 16384
    --train-backend megatron --rollout-backend sglang --rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.7
)

train repro_first train.py "${same[@]}"
train repro_second train.py "${same[@]}"

snapshots="$output_dir/repro_resumed/checkpoints"
KILL_AFTER=5 train repro_resumed examples/reproducibility/killed.py "${same[@]}" --save-interval 3 --save "$snapshots"
train repro_resumed train.py "${same[@]}" --save-interval 3 --save "$snapshots" --save-keep-last 1 --load "$snapshots"

if [ "${DRY_RUN:-}" != 1 ]; then
    "$python" "$here/same.py" "$output_dir/repro_first" "$output_dir/repro_second" "$output_dir/repro_resumed"
fi
