# Qwen2.5-0.5B and its Instruct version.
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 896
    --ffn-hidden-size 4864
    --num-attention-heads 14
    --group-query-attention
    --num-query-groups 2
    --add-qkv-bias
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
    --position-embedding-type rope
    --rotary-base 1000000
    --disable-bias-linear
    --vocab-size 151936
)
