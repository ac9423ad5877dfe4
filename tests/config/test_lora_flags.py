"""The flags of LoRA: defaults, the adapter that ``--load`` names, and what is refused with the
reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from config_parts import Workplace
from make_args import make_args, rule_problems

from slime.config import rules, trainer
from slime.config.lora import (
    ADAPTER_NAME,
    check_lora,
    engine_adapter,
)
from slime.config.machine import Machine
from slime.config.parser import ConfigError
from slime.engines.launch import sglang_targets
from slime.plugins.megatron.flags import adapter_problems
from slime.rollout.state import GenerateState
from slime.weights.settings import WeightSyncSettings, sglang_adapter

MEGATRON = "--lora-rank 8 --train-backend megatron "
GPU = Machine(gpus=1, cores=8, in_cluster=False)
INT8 = "--lora-rank 8 --lora-base-quantization int8 "


@pytest.fixture(autouse=True)
def every_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao is an extra, which the tests of flags do not need."""
    monkeypatch.setattr(rules, "installed", lambda name: True)


def test_defaults(workplace: Workplace) -> None:
    args = workplace.load()
    assert args.lora_rank == 0 and args.lora_sync == "merged"
    args = workplace.load("--lora-rank 16 --lr 1e-5")
    assert (args.lora_rank, args.lora_alpha, args.use_rslora, args.lora_dropout) == (
        16,
        32.0,
        False,
        0.0,
    )
    assert (args.lora_target_modules, args.lora_exclude_modules) == (["all-linear"], None)
    assert (args.lora_init, args.lora_export, args.lora_sync) == ("kaiming", "peft", "adapter")
    assert not any("--lr" in notice for notice in args.notices)


def test_a_quantized_base_needs_torchao_and_no_compiled_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "installed", lambda name: name != "torchao")
    monkeypatch.setattr(trainer, "installed", lambda name: True)
    args = make_args(train_backend="fsdp", lora_rank=8, lora_base_quantization="nf4")
    (problem,) = rule_problems(args)
    assert "--lora-base-quantization nf4 needs the package torchao" in problem
    for form, compiled in (("nf4", False), (None, True)):
        args.lora_base_quantization, args.compile_layers = form, None
        trainer.derive_model(rules.Run(args, machine=GPU))
        assert args.compile_layers is compiled


def test_routed_experts_have_no_codes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 8}))
    args = make_args(
        train_backend="fsdp",
        lora_rank=8,
        lora_base_quantization="int8",
        hf_checkpoint=str(tmp_path),
        ref_load=None,
    )
    assert any("routed experts" in problem for problem in rule_problems(args))


def test_what_an_adapter_in_load_says_is_the_default(workplace: Workplace) -> None:
    said = {"r": 8, "lora_alpha": 64, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}
    file = workplace.root / "adapter" / "adapter_config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(said))
    args = workplace.load(f"--load {file.parent}")
    assert (args.lora_rank, args.lora_alpha, args.use_rslora) == (8, 64.0, True)
    assert args.lora_target_modules == ["q_proj", "v_proj"]
    with pytest.raises(ConfigError, match=r"--lora-rank 4.*--load.*r 8"):
        workplace.load(f"--load {file.parent} --lora-rank 4")
    file.write_text("{}")
    assert workplace.load(f"--load {file.parent}").lora_rank == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--lora-alpha 16", "--lora-alpha 16.0 needs --lora-rank"),
        ("--lora-rank -1", "--lora-rank -1"),
        ("--lora-rank 8 --lora-dropout 1", "--lora-dropout 1"),
        (
            MEGATRON + "--lora-dropout 0.1",
            "--lora-dropout 0.1 and --train-backend megatron exclude",
        ),
        (
            "--lora-rank 8 --lora-target-modules experts --lora-dropout 0.1",
            "--lora-target-modules experts exclude",
        ),
        (
            "--lora-rank 8 --lora-target-modules experts --lora-sync adapter",
            "need merged weights of routed experts",
        ),
        ("--lora-base-quantization nf4", "--lora-base-quantization nf4 needs --lora-rank"),
        (
            MEGATRON + "--lora-base-quantization nf4",
            "Megatron's parallel layers have no quantized weights",
        ),
        (INT8 + "--actor-num-gpus-per-node 2", "several training ranks exclude"),
        (INT8 + "--compile-layers", "torchao's tensors are not compiled"),
        (INT8 + "--ref-load {other}", "is not the base"),
        # --load is the base then, and the reference is --hf-checkpoint
        (INT8 + "--load {other} --use-kl-loss --kl-loss-coef 0.1", "is not the base {other}"),
        (MEGATRON + "--ckpt-format torch", "--ckpt-format torch exclude"),
        (
            MEGATRON + "--moe-router-bias-update-rate 0.1",
            "--moe-router-bias-update-rate 0.1 exclude",
        ),
        (
            "--lora-rank 8 --only-train-params-name-list q_proj",
            "--only-train-params-name-list q_proj exclude",
        ),
        (
            "--lora-rank 8 --lora-sync adapter --update-weight-transport disk "
            "--update-weight-disk-dir /tmp/x",
            "these engines get whole models",
        ),
        (
            "--lora-rank 8 --lora-sync adapter --rollout-external-engine-addrs 127.0.0.1:1",
            "these engines get whole models",
        ),
        (
            "--lora-rank 8 --ref-update-interval 2 --use-kl-loss --kl-loss-coef 0.1 --ref-load "
            "{other}",
            "the same base",
        ),
        (
            "--lora-rank 8 --ref-update-interval 2 --use-kl-loss --kl-loss-coef 0.1 --load {other}",
            "--ref-load {other}",
        ),
    ],
)
def test_what_is_refused(workplace: Workplace, line: str, said: str) -> None:
    other = workplace.root / "other"
    other.mkdir()
    (other / "config.json").write_text((workplace.root / "model" / "config.json").read_text())
    with pytest.raises(ConfigError) as error:
        workplace.load(line.format(other=other))
    assert said.format(other=other) in str(error.value)


@pytest.mark.parametrize(
    ("config", "ranks", "said"),
    [
        ({"num_key_value_heads": 2}, 2, None),
        (
            {"num_key_value_heads": 2},
            4,
            "4 tensor-parallel ranks cannot share the adapters of 2 key-value heads",
        ),
        ({"num_attention_heads": 4}, 4, None),
        ({"kv_lora_rank": 512, "num_attention_heads": 4}, 1, "the projections of latent attention"),
        (
            {"layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 4},
            2,
            None,
        ),
        ({"model_type": "phi3"}, 1, "query, key and value in one matrix (phi3)"),
        ({}, 8, None),  # config.json is not on this machine
    ],
)
def test_models_without_adapters_on_megatron(
    config: dict[str, object], ranks: int, said: str | None
) -> None:
    problems = adapter_problems(config, ranks)
    assert len(problems) == (said is not None) and all(str(said) in problem for problem in problems)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--lora-rank 8", "ten times"),
        ("--lora-rank 8 --lora-dropout 0.1", "importance ratios"),
    ],
)
def test_notices(workplace: Workplace, line: str, said: str) -> None:
    assert any(said in notice for notice in workplace.load(line).notices)


@pytest.mark.parametrize(
    "line",
    ["--rollout-backend sglang", "--update-weight-transport disk --update-weight-disk-dir /tmp/x"],
)
def test_engines_without_adapters_get_merged_weights(workplace: Workplace, line: str) -> None:
    assert workplace.load_unchecked(["--lora-rank", "8", *line.split()]).lora_sync == "merged"


SGLANG: dict[str, Any] = dict(
    rollout_backend="sglang", lora_rank=8, lora_sync="adapter", lora_target_modules=["all-linear"]
)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_engines_load_the_adapter_by_name_if_they_are_asked_to(backend: str) -> None:
    by_name = SGLANG | {"rollout_backend": backend}
    args = make_args(**by_name, offload_rollout=True, update_weight_pause_mode="drain")
    settings = WeightSyncSettings.from_args(args)
    assert settings.adapter_name == GenerateState(args).requests.adapter == ADAPTER_NAME
    assert not settings.engines_lose_weights
    # Nobody loads the adapter without a trainer, so requests that name it would be refused.
    assert GenerateState(make_args(**by_name, debug_rollout_only=True)).requests.adapter is None
    args = args.with_values(lora_sync="merged")
    settings = WeightSyncSettings.from_args(args)
    assert settings.adapter_name is None is GenerateState(
        args
    ).requests.adapter and settings.engines_lose_weights is (backend == "sglang")
    assert engine_adapter(8, "adapter", "embedded") is None  # the embedded engine needs no name


@pytest.mark.parametrize(
    ("targets", "room"),
    [
        (["all-linear"], ALL),
        (["self_attn.q_proj"], ALL[:3]),  # in SGLang these three are one layer
        (["down_proj", "up_proj"], ALL[4:]),
    ],
)
def test_projections_for_which_sglang_makes_room(targets: list[str], room: list[str]) -> None:
    assert sglang_targets(targets) == room


@pytest.mark.parametrize(
    ("flags", "config", "said"),
    [
        ({}, {"model_type": "qwen3"}, None),
        ({"rollout_backend": "vllm", "lora_target_modules": ["q_proj", "gate"]}, {}, None),
        ({"rollout_backend": "vllm", "update_weight_pause_mode": "retract"}, {}, "use abort"),
        ({"rollout_backend": "vllm"}, {"num_experts": 8}, "routed experts"),
        ({"update_weight_pause_mode": "abort"}, {}, None),
        ({"update_weight_pause_mode": "retract"}, {}, "use abort"),
        ({"update_weight_pause_mode": "in_place"}, {}, "use abort"),
        ({"update_weight_mode": "delta"}, {}, "--update-weight-mode delta"),
        ({"sglang": {"dp_size": 2}}, {}, "--sglang-dp-size 2"),
        ({"lora_target_modules": ["q_proj", "gate"]}, {}, "on gate"),
        ({"lora_target_modules": ["experts"]}, {}, "merged weights of routed experts"),
        ({}, {"num_experts": 8}, "routed experts"),
        ({}, {"n_routed_experts": 8}, "routed experts"),
        ({}, {"kv_lora_rank": 8}, "latent attention"),
        ({}, {"layer_types": ["linear_attention"]}, "delta nets"),
        ({}, {"model_type": "phi3"}, "fused projections"),
    ],
)
def test_flags_and_models_with_which_engines_load_no_adapter_by_name(
    flags: dict[str, Any], config: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = make_args(**(SGLANG | flags), hf_checkpoint=str(tmp_path))
    problems = [
        problem for problem in [*check_lora(args), *rule_problems(args)] if "--lora-sync" in problem
    ]
    assert bool(problems) is (said is not None) and all(
        str(said) in problem for problem in problems
    )


def test_the_file_from_which_sglang_computes_the_same_factor() -> None:
    layers = [
        f"model.layers.{i}.{name}"
        for i in range(2)
        for name in ("mlp.down_proj", "self_attn.o_proj")
    ]
    config = {"r": 16, "lora_alpha": 8.0, "use_rslora": True, "target_modules": layers}
    made = sglang_adapter(config)
    assert made["lora_alpha"] == 32.0 and not made["use_rslora"]  # 32 / 16 is 8 / sqrt(16)
    assert sglang_adapter({**config, "use_rslora": False})["lora_alpha"] == 8.0
    with pytest.raises(ValueError, match=r"layers.1.mlp.*up_proj.*SGLang"):
        sglang_adapter({**config, "target_modules": [*layers, "model.layers.1.mlp.up_proj"]})
