#!/usr/bin/env bash
# Train SmolLM2-135M-Instruct to use a calculator. Two CPU cores are enough; it takes several minutes.
#
#   bash run.sh                    # train
#   bash run.sh --dry-run          # print what would happen: settings, batches, the first prompt
#   bash run.sh --num-rollout 50   # any flag of slime train; the last one counts
#   bash run.sh check-hooks        # test the functions of reward.py with a few samples
#
# MODEL=/path/to/model bash run.sh uses another Hugging Face folder.
set -euo pipefail
# A relative folder is one of where the command was typed.
if [ -d "${MODEL:-}" ]; then MODEL="$(realpath "$MODEL")"; fi
cd "$(dirname "${BASH_SOURCE[0]}")"

command=train
if [ "${1:-}" = check-hooks ]; then command=check-hooks && shift; fi
model="${MODEL:-$(slime fetch-model smollm2-135m-instruct | tail -n 1)}"  # fetched once, into models/

flags=(
    --hf-checkpoint "$model"

    # The data: a row has a prompt (chat messages) and a label.
    --prompt-data data.jsonl --rollout-shuffle
    --eval-prompt-data heldout heldout.jsonl --eval-interval 6

    # The turns and the reward are functions of reward.py. --log-multi-turn adds metrics of the turns.
    --custom-generate-function-path reward.py:generate --max-turns 3 --log-multi-turn
    --custom-rm-path reward.py:reward

    # A rollout: 8 prompts, 8 conversations of each, with at most 64 tokens after the prompt.
    --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 64 --num-rollout 12

    # The algorithm and the learning rate. For larger models, 1e-6 is a usual start.
    --advantage-estimator grpo --lr 1e-5

    # Snapshots, from which --load outputs/starter/checkpoints continues: --save-interval 6
    --run-name starter

    # Everything in one process, where breakpoint() works; without it, on Ray, on any number of GPUs and machines.
    --inline

    # A machine without GPUs. Remove this line on GPUs, and see docs/en/backends.md. Their default is bfloat16, with which so
    # few steps with so small a learning rate change little.
    --train-backend fsdp --rollout-backend embedded --max-tokens-per-gpu 2048 --train-dtype float32 --rollout-dtype float32
)
exec slime "$command" "${flags[@]}" "$@"
