# Qwen2.5-1.5B and its Instruct version.
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 1536
    --ffn-hidden-size 8960
    --num-attention-heads 12
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
