#!/usr/bin/env bash
# Search as a tool, on two CPU cores: two minutes of fine-tuning on transcripts, then GRPO, with SmolLM2-135M.
# RETRIEVER=dense searches by all-MiniLM-L6-v2 (fetched once, 84 MB) instead of BM25.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model="$(example_model)"
encoder=""
if [ "${RETRIEVER:-bm25}" = dense ]; then
    encoder="$("$python" -m slime.cli.main fetch-model all-minilm-l6-v2 | tail -n 1)"
fi
data="$("$python" "$here/make_corpus.py" "$output_dir/data/search-r1" --seed "${SEED:-1}" \
    --retriever "${RETRIEVER:-bm25}" --encoder "$encoder")"
checkpoints="$output_dir/search-r1_sft/checkpoints"
mkdir -p "$checkpoints"
both=(  # no shuffling: questions of one and of two hops alternate, so every step has as many of each
    --hf-checkpoint "$model" --use-dynamic-batch-size --max-tokens-per-gpu 2048
    --train-dtype float32 --train-backend fsdp "${engine[@]}"
)

# Half of the transcripts search as often as the question needs, the other half guess: after this the model does either.
train search-r1_sft train.py "${both[@]}" \
    --prompt-data "$data/transcripts.jsonl" --input-key messages \
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss \
    --disable-compute-advantages-and-returns --debug-train-only \
    --rollout-batch-size 16 --num-rollout 12 --lr 5e-5 \
    --save "$checkpoints" --save-interval 12 --no-save-optim

train search-r1 train.py "${both[@]}" \
    --load "$checkpoints" --finetune \
    --prompt-data "$data/train.jsonl" --custom-config-path "$data/search.yaml" \
    --custom-generate-function-path "$here/generate_with_search.py:generate" --max-turns 3 --log-multi-turn \
    --custom-rm-path "$here/generate_with_search.py:exact_match" \
    --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 128 \
    --num-rollout "${NUM_ROLLOUT:-10}" --eval-interval "${NUM_ROLLOUT:-10}" \
    --eval-prompt-data people "$data/eval.jsonl" --n-samples-per-eval-prompt 2 \
    --advantage-estimator grpo --lr 5e-6
