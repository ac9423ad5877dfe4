# Qwen2.5-7B and its Instruct version.
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --group-query-attention
    --num-query-groups 4
    --add-qkv-bias
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
    --position-embedding-type rope
    --rotary-base 1000000
    --disable-bias-linear
    --vocab-size 152064
    --untie-embeddings-and-output-weights
)
