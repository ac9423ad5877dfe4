# GLM-4-32B-0414 and GLM-Z1-32B-0414.
MODEL_ARGS=(
    --num-layers 64
    --hidden-size 6144
    --ffn-hidden-size 23040
    --num-attention-heads 48
    --group-query-attention
    --num-query-groups 8
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
    --max-position-embeddings 32768
    --vocab-size 151552
    --untie-embeddings-and-output-weights
)
