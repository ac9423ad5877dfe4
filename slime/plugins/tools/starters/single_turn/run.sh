#!/usr/bin/env bash
# Train SmolLM2-135M-Instruct on this folder's task. Two CPU cores are enough; it takes a few minutes.
#
#   bash run.sh                    # train
#   bash run.sh --dry-run          # print what would happen: settings, batches, the first prompt, its reward
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

    # The data: a row has a prompt (chat messages or a text) and a label. --apply-chat-template renders the messages.
    --prompt-data data.jsonl --apply-chat-template --rollout-shuffle
    --eval-prompt-data heldout heldout.jsonl --eval-interval 6 --n-samples-per-eval-prompt 4

    # The reward: your function, or a built-in one such as --rm-type math.
    --custom-rm-path reward.py:reward

    # A rollout: 8 prompts, 8 responses to each, of at most 20 tokens. One optimizer step per rollout.
    --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 20 --num-rollout 12

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
