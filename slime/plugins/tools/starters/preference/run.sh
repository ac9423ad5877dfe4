#!/usr/bin/env bash
# Train SmolLM2-135M-Instruct on pairs of answers (DPO). Two CPU cores are enough; it takes a few minutes.
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

    # The data: a row has a prompt, and two answers, of which the chosen one is preferred.
    --prompt-data data.jsonl --rollout-shuffle

    # The loss: DPO against the model itself as it is now. --loss-type kto takes the answers one by one.
    --loss-type dpo --dpo-beta 0.1

    # A rollout: 16 pairs. Nothing is generated for training.
    --rollout-batch-size 16 --num-rollout 12 --lr 1e-5

    # The evaluation generates answers to prompts that were held out, and scores them.
    --eval-prompt-data heldout heldout.jsonl --eval-interval 6 --n-samples-per-eval-prompt 4
    --eval-function-path slime.rollout.sglang_rollout.generate_rollout
    --rollout-max-response-len 20 --custom-rm-path reward.py:reward

    # Snapshots, from which --load outputs/starter/checkpoints continues: --save-interval 6
    --run-name starter

    # Everything in one process, where breakpoint() works; without it, on Ray, on any number of GPUs and machines.
    --inline

    # A machine without GPUs. Remove this line on GPUs, and see docs/en/backends.md. Their default is bfloat16, with which so
    # few steps with so small a learning rate change little.
    --train-backend fsdp --rollout-backend embedded --max-tokens-per-gpu 2048 --train-dtype float32 --rollout-dtype float32
)
exec slime "$command" "${flags[@]}" "$@"
