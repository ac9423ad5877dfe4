# SmolLM2-135M(-Instruct), Llama architecture. Source it, then pass "${MODEL_ARGS[@]}" to train.py.
#
#   source scripts/models/smollm2-135m.sh
#   python train.py "${MODEL_ARGS[@]}" --hf-checkpoint models/SmolLM2-135M-Instruct ...
MODEL_ARGS=(
    --num-layers 30
    --hidden-size 576
    --ffn-hidden-size 1536
    --num-attention-heads 9
    --group-query-attention
    --num-query-groups 3
    --kv-channels 64
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --use-rotary-position-embeddings
    --position-embedding-type rope
    --rotary-base 100000
    --disable-bias-linear
    --max-position-embeddings 8192
    --vocab-size 49152
)
