"""Flags of SGLang, its router and Megatron: what is known, where it lands, how it is handed on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.config.args import FLAGS, Args
from slime.config.parser import read_command_line
from slime.config.passthrough import by_name, command_line, options, programs

VOCABULARY = """
--num-layers --hidden-size --ffn-hidden-size --num-attention-heads --num-query-groups --kv-channels --normalization
--norm-epsilon --position-embedding-type --rotary-base --rotary-percent --rotary-scaling-factor
--max-position-embeddings --vocab-size --spec --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim
--v-head-dim --mscale --mscale-all-dim --num-experts --moe-layer-freq --moe-ffn-hidden-size --moe-router-topk
--moe-shared-expert-intermediate-size --moe-token-dispatcher-type --moe-aux-loss-coeff --moe-token-drop-policy
--tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size --expert-model-parallel-size
--expert-tensor-parallel-size --recompute-granularity --recompute-method --recompute-num-layers --optimizer
--lr-decay-style --min-lr --lr-warmup-fraction --weight-decay --adam-beta1 --adam-beta2 --attention-dropout
--hidden-dropout --attention-backend --group-query-attention --qk-layernorm --swiglu --use-rotary-position-embeddings
--rotary-interleaved --no-rope-fusion --use-rope-scaling --disable-bias-linear --add-qkv-bias
--untie-embeddings-and-output-weights --post-self-attn-layernorm --post-mlp-layernorm --apply-layernorm-1p
--use-gated-attention --attention-output-gate --attention-softmax-in-fp32 --no-masked-softmax-fusion
--multi-latent-attention --moe-grouped-gemm --moe-permute-fusion --sequence-parallel --recompute-activations
--accumulate-allreduce-grads-in-fp32 --calculate-per-token-loss --seq-length --mtp-num-layers --allgather-cp
--make-vocab-size-divisible-by --no-position-embedding --enable-experimental --moe-shared-expert-gate
"""

QWEN3_4B = """
--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6
--rotary-base 1000000 --vocab-size 151936 --kv-channels 128 --qk-layernorm
"""
DEEPSEEK = """
--moe-layer-freq ([0]*3+[1]*58) --multi-latent-attention --q-lora-rank 1536 --moe-aux-loss-coeff 0
--spec slime_plugins.models.glm4 get_glm_spec --moe-router-load-balancing-type seq_aux_loss --moe-router-dtype fp32
"""


def test_every_flag_of_the_model_scripts_is_known() -> None:
    own = {flag.option for flag in FLAGS.values()}
    assert [
        option for option in VOCABULARY.split() if option not in own and option not in options()
    ] == []


def test_model_args_land_in_args() -> None:
    args, problems = read_command_line(QWEN3_4B.split())
    assert problems == []
    assert args.megatron["num_layers"] == 36 and args.num_layers == 36
    assert args.norm_epsilon == 1e-6 and args.rotary_base == 1e6
    assert (args.swiglu, args.add_bias_linear, args.qk_layernorm) == (True, False, True)
    args.train_backend = "megatron"
    # defaults of the pinned version
    assert (args.tensor_model_parallel_size, args.moe_router_dtype) == (1, None)


def test_expressions_and_two_word_flags_pass() -> None:
    args, problems = read_command_line(DEEPSEEK.split())
    assert problems == []
    assert args.moe_layer_freq == "([0]*3+[1]*58)"
    assert args.spec == ["slime_plugins.models.glm4", "get_glm_spec"]
    assert args.moe_aux_loss_coeff == 0


@pytest.mark.parametrize(
    "model", sorted(json.loads((Path(__file__).parent / "model_args.json").read_text()))
)
def test_public_model_shapes_parse(model: str) -> None:
    shapes = json.loads((Path(__file__).parent / "model_args.json").read_text())[model]
    words = [
        word
        for option, value in shapes.items()
        for word in ([option] if value is True else [option, *value.split()])
    ]
    args, problems = read_command_line(words)
    assert problems == []
    assert args.megatron["num_layers"] == int(shapes["--num-layers"])


def test_sglang_flags_of_the_seeds() -> None:
    typed = (
        "--sglang-mem-fraction-static 0.8 --sglang-context-length 8192 --sglang-log-level INFO "
        "--sglang-cuda-graph-bs 1 2 4 8 --sglang-server-concurrency 160 "
        "--sglang-enable-dp-attention"
    )
    args, problems = read_command_line(typed.split())
    assert problems == []
    assert args.sglang == {
        "mem_fraction_static": 0.8,
        "context_length": 8192,
        "log_level": "INFO",
        "cuda_graph_bs_decode": [1, 2, 4, 8],
        "enable_dp_attention": True,
    }
    assert args.sglang_server_concurrency == 160  # slime's own
    assert args.sglang_mem_fraction_static == 0.8
    assert args.sglang_disable_radix_cache is False


def test_short_and_long_names_are_one() -> None:
    for typed in ("--sglang-dp-size 2", "--sglang-data-parallel-size 2"):
        assert read_command_line(typed.split())[0].sglang == {"dp_size": 2}


def test_router_flags_have_slimes_defaults() -> None:
    args, problems = read_command_line(["--router-policy", "manual"])
    assert problems == []
    assert (args.router_policy, args.router_balance_abs_threshold, args.router_log_level) == (
        "manual",
        10,
        "warn",
    )
    assert args.router == {"policy": "manual"}


def test_command_lines_for_the_servers() -> None:
    given = {
        "cuda_graph_bs_decode": [1, 2],
        "mem_fraction_static": 0.7,
        "disable_radix_cache": True,
        "enable_lora": False,
    }
    assert command_line("sglang", given) == [
        "--cuda-graph-bs-decode", "1", "2", "--mem-fraction-static", "0.7", "--disable-radix-cache",
    ]  # fmt: skip
    assert command_line("router", {"policy": "manual"}) == ["--policy", "manual"]


@pytest.mark.parametrize("version", programs()["sglang"].by_version)
def test_a_toggle_of_sglang_is_passed_as_it_was_typed(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.config.passthrough.version_of", lambda package: version)
    table = programs()["sglang"].by_version[version]
    toggles = [name for name, entry in table.items() if entry["kind"] == "toggle"]
    for name in toggles:
        given = read_command_line([f"--sglang-{name[2:]}"])[0].sglang
        assert list(given.values()) == [not name.startswith("--no-")]
        default = table[name].get("default")
        assert command_line("sglang", given) == ([] if default in given.values() else [name])


@pytest.mark.parametrize("version", programs()["sglang"].by_version)
def test_tables_hold_what_slime_relies_on(version: str) -> None:
    table = programs()["sglang"].by_version[version]
    assert len(table) > 400
    for option in (
        "--mem-fraction-static",
        "--attention-backend",
        "--enable-memory-saver",
        "--custom-weight-loader",
    ):
        assert option in table
    assert table["--mem-fraction-static"]["type"] == "float"


def test_no_pass_through_name_hides_a_field() -> None:
    megatron = set(by_name("megatron"))
    assert megatron & {"tensor_model_parallel_size", "num_layers"}
    fields = vars(Args()).keys()
    shadowed = {name for name in fields if f"--{name.replace('_', '-')}" in options()} - set(FLAGS)
    assert shadowed == set()
