# Qwen3.5-27B, and Qwen3.6 of this size. config.json has the rest: which layers are gated delta nets, and their heads.
MODEL_ARGS=(
    --num-layers 64
    --hidden-size 5120
    --ffn-hidden-size 17408
    --num-attention-heads 24
    --group-query-attention
    --num-query-groups 4
    --kv-channels 256
    --qk-layernorm
    --use-gated-attention
    --attention-output-gate
    --swiglu
    --normalization RMSNorm
    --apply-layernorm-1p
    --norm-epsilon 1e-6
    --position-embedding-type rope
    --rotary-base 10000000
    --rotary-percent 0.25
    --disable-bias-linear
    --vocab-size 248320
    --untie-embeddings-and-output-weights
)
