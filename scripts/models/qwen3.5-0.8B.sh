# Qwen3.5-0.8B. config.json has the rest: which layers are gated delta nets, and their heads.
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 1024
    --ffn-hidden-size 3584
    --num-attention-heads 8
    --group-query-attention
    --num-query-groups 2
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
)
