#!/usr/bin/env bash
# Distil a teacher into SmolLM2-135M-Instruct. Two CPU cores are enough; it takes a few minutes.
#
#   bash run.sh                    # train
#   bash run.sh --dry-run          # print what would happen: settings, batches, the first prompt
#   bash run.sh --num-rollout 50   # any flag of slime train; the last one counts
#   bash run.sh check-hooks        # test the functions of reward.py with a few samples
#
# MODEL=/path/to/model bash run.sh uses another Hugging Face folder.
# TEACHER=/path/to/teacher takes your own teacher, with the same tokenizer and of any size.
set -euo pipefail
# A relative folder is one of where the command was typed.
if [ -d "${MODEL:-}" ]; then MODEL="$(realpath "$MODEL")"; fi
if [ -d "${TEACHER:-}" ]; then TEACHER="$(realpath "$TEACHER")"; fi
cd "$(dirname "${BASH_SOURCE[0]}")"

command=train
if [ "${1:-}" = check-hooks ]; then command=check-hooks && shift; fi
model="${MODEL:-$(slime fetch-model smollm2-135m-instruct | tail -n 1)}"  # fetched once, into models/
teacher="${TEACHER:-outputs/teacher/model}"

# Without a teacher of your own, the model itself becomes one: it imitates the answers of lessons.jsonl for a minute. Checks
# train none, the model stands in for it.
if [[ $command = check-hooks || " $* " = *" --dry-run "* ]]; then
    TEACHER="${TEACHER:-$model}" && teacher="$TEACHER"
fi
if [ ! -e "$teacher/config.json" ] && [ -z "${TEACHER:-}" ]; then
    slime train --run-name teacher --inline --train-backend fsdp --max-tokens-per-gpu 2048 --debug-train-only \
        --hf-checkpoint "$model" --prompt-data lessons.jsonl --input-key messages --rollout-shuffle \
        --loss-type sft_loss --rollout-function-path slime.rollout.sft_rollout.generate_rollout \
        --disable-compute-advantages-and-returns --rollout-batch-size 13 --num-rollout 15 --lr 3e-5 \
        --save outputs/teacher/checkpoints --save-interval 15 --no-save-optim --save-hf "$teacher"
fi

flags=(
    --hf-checkpoint "$model"

    # The data: prompts. The label is only for the metric of reward.py.
    --prompt-data data.jsonl --apply-chat-template --rollout-shuffle
    --eval-prompt-data heldout heldout.jsonl --eval-interval 6 --n-samples-per-eval-prompt 4
    --custom-rm-path reward.py:reward

    # The loss: at each token, the KL from the student to the teacher. --distill-top-k 64 takes the likeliest tokens only.
    --loss-type distill --distill-teacher "$teacher" --distill-divergence reverse_kl

    # A rollout: 8 prompts, 4 answers of the student to each.
    --rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-max-response-len 16 --num-rollout 12 --lr 2e-5

    # Snapshots, from which --load outputs/starter/checkpoints continues: --save-interval 6
    --run-name starter

    # Everything in one process, where breakpoint() works; without it, on Ray, on any number of GPUs and machines.
    --inline

    # A machine without GPUs. Remove this line on GPUs, and see docs/en/backends.md. Their default is bfloat16, with which so
    # few steps with so small a learning rate change little.
    --train-backend fsdp --rollout-backend embedded --max-tokens-per-gpu 2048 --train-dtype float32 --rollout-dtype float32
)
exec slime "$command" "${flags[@]}" "$@"
