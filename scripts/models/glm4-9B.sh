# GLM-4-9B-0414 and GLM-Z1-9B-0414.
MODEL_ARGS=(
    --num-layers 40
    --hidden-size 4096
    --ffn-hidden-size 13696
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 2
    --add-qkv-bias
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --post-self-attn-layernorm
    --post-mlp-layernorm
    --use-rotary-position-embeddings
    --position-embedding-type rope
    --rotary-base 10000
    --rotary-percent 0.5
    --rotary-interleaved
    --no-rope-fusion
    --disable-bias-linear
    --vocab-size 151552
    --untie-embeddings-and-output-weights
)
