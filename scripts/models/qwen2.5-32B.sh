# Qwen2.5-32B; for the Instruct version: MODEL_ARGS_NORM_EPSILON=1e-6.
MODEL_ARGS=(
    --num-layers 64
    --hidden-size 5120
    --ffn-hidden-size 27648
    --num-attention-heads 40
    --group-query-attention
    --num-query-groups 8
    --add-qkv-bias
    --swiglu
    --normalization RMSNorm
    --norm-epsilon "${MODEL_ARGS_NORM_EPSILON:-1e-5}"
    --use-rotary-position-embeddings
    --position-embedding-type rope
    --rotary-base 1000000
    --disable-bias-linear
    --vocab-size 152064
    --untie-embeddings-and-output-weights
)
