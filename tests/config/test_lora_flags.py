"""The flags of LoRA: defaults, the adapter that ``--load`` names, and what is refused with the reason."""

from __future__ import annotations

import json

import pytest
from config_parts import Workplace

from slime.config.lora import megatron_problems
from slime.config.parser import ConfigError

MEGATRON = "--lora-rank 8 --train-backend megatron "


def test_defaults(workplace: Workplace) -> None:
    args = workplace.load()
    assert args.lora_rank == 0 and args.lora_sync == "merged"
    args = workplace.load("--lora-rank 16 --lr 1e-5")
    assert (args.lora_rank, args.lora_alpha, args.use_rslora, args.lora_dropout) == (16, 32.0, False, 0.0)
    assert (args.lora_target_modules, args.lora_exclude_modules) == (["all-linear"], None)
    assert (args.lora_init, args.lora_export, args.lora_sync) == ("kaiming", "peft", "adapter")
    assert not any("--lr" in notice for notice in args.notices)


def test_what_an_adapter_in_load_says_is_the_default(workplace: Workplace) -> None:
    said = {"r": 8, "lora_alpha": 64, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}
    file = workplace.root / "adapter" / "adapter_config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(said))
    args = workplace.load(f"--load {file.parent}")
    assert (args.lora_rank, args.lora_alpha, args.use_rslora) == (8, 64.0, True)
    assert args.lora_target_modules == ["q_proj", "v_proj"]
    with pytest.raises(ConfigError, match=r"--lora-rank 4, but the adapter in --load .* has r 8"):
        workplace.load(f"--load {file.parent} --lora-rank 4")
    file.write_text("{}")
    assert workplace.load(f"--load {file.parent}").lora_rank == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--lora-alpha 16", "--lora-alpha has no effect without --lora-rank"),
        ("--use-rslora", "--use-rslora has no effect without --lora-rank"),
        ("--lora-rank -1", "--lora-rank -1"),
        ("--lora-rank 8 --lora-dropout 1", "--lora-dropout 1"),
        (MEGATRON + "--lora-dropout 0.1", "adapters of --train-backend megatron have no dropout"),
        (MEGATRON + "--ckpt-format torch", "--ckpt-format torch writes whole models"),
        (MEGATRON + "--moe-router-bias-update-rate 0.1", "--moe-router-bias-update-rate changes the base"),
        ("--lora-rank 8 --only-train-params-name-list q_proj", "--only-train-params-name-list excludes --lora-rank"),
        ("--lora-rank 8 --freeze-params-name-list q_proj", "--freeze-params-name-list excludes --lora-rank"),
        ("--lora-rank 8 --lora-sync adapter --rollout-backend sglang", "sglang needs merged weights so far"),
        (
            "--lora-rank 8 --lora-sync adapter --update-weight-transport disk --update-weight-disk-dir /tmp/x",
            "--update-weight-transport disk writes whole models",
        ),
        ("--lora-rank 8 --lora-sync adapter --rollout-external-engine-addrs 127.0.0.1:1", "need merged weights"),
        ("--lora-rank 8 --ref-update-interval 2 --use-kl-loss --kl-loss-coef 0.1 --ref-load {other}", "the same base"),
    ],
)
def test_what_is_refused(workplace: Workplace, line: str, said: str) -> None:
    other = workplace.root / "other"
    other.mkdir()
    (other / "config.json").write_text((workplace.root / "model" / "config.json").read_text())
    with pytest.raises(ConfigError) as error:
        workplace.load(line.format(other=other))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("config", "ranks", "said"),
    [
        ({"num_key_value_heads": 2}, 2, None),
        ({"num_key_value_heads": 2}, 4, "4 tensor-parallel ranks cannot share the adapters of 2 key-value heads"),
        ({"num_attention_heads": 4}, 4, None),
        ({"kv_lora_rank": 512, "num_attention_heads": 4}, 1, "the projections of latent attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, 1, "gated delta nets and gated attention"),
        ({"model_type": "phi3"}, 1, "query, key and value in one matrix (phi3)"),
        ({}, 8, None),  # config.json is not on this machine
    ],
)
def test_models_without_adapters_on_megatron(config: dict[str, object], ranks: int, said: str | None) -> None:
    problems = megatron_problems(config, ranks)
    assert len(problems) == (said is not None) and all(str(said) in problem for problem in problems)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--lora-rank 8", "LoRA usually needs about ten times the rate"),
        ("--lora-rank 8 --lora-dropout 0.1", "adds noise to importance ratios"),
    ],
)
def test_notices(workplace: Workplace, line: str, said: str) -> None:
    assert any(said in notice for notice in workplace.load(line).notices)


@pytest.mark.parametrize(
    "line", ["--rollout-backend sglang", "--update-weight-transport disk --update-weight-disk-dir /tmp/x"]
)
def test_engines_without_adapters_get_merged_weights(workplace: Workplace, line: str) -> None:
    assert workplace.load_unchecked(["--lora-rank", "8", *line.split()]).lora_sync == "merged"
