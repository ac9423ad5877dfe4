#!/usr/bin/env bash
# Search-R1 on a node of 8 GPUs: Qwen3-4B, trained by Megatron, over your own corpus.
#
#   MODEL=/models/Qwen3-4B DATA=hotpotqa_train.jsonl CORPUS=wiki-18.jsonl bash examples/search-r1/run_gpu.sh
#
# DATA: prompt (messages; say in the system message how to search and answer), label. CORPUS: "contents" in each row.
# BM25 keeps the corpus in memory, about 40 GB for the whole of Wikipedia in 21 million passages.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
source "$checkout/scripts/models/qwen3-4B.sh"

data="${DATA:?a JSONL file of questions: prompt (messages), label}"
settings="$output_dir/search.yaml"
cat >"$settings" <<SETTINGS
search_corpus: "${CORPUS:-$output_dir/data/search-r1/corpus.jsonl}"
search_retriever: "${RETRIEVER:-bm25}"
search_encoder: "${ENCODER:-}"
search_top_k: 3
SETTINGS

train search-r1 train.py \
    "${MODEL_ARGS[@]}" --hf-checkpoint "${MODEL:-Qwen/Qwen3-4B}" \
    --prompt-data "$data" --rollout-shuffle --custom-config-path "$settings" \
    --custom-generate-function-path "$here/generate_with_search.py:generate" --max-turns 5 --log-multi-turn \
    --custom-rm-path "$here/generate_with_search.py:f1" \
    --rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-response-len 4096 --num-rollout 300 \
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --eps-clip-high 0.28 --lr 1e-6 --weight-decay 0.1 \
    --save-interval 20 --save-keep-last 2 \
    --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
    --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --recompute-method uniform \
    --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216 --train-backend megatron \
    --rollout-backend sglang --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7
