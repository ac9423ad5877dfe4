"""The flags of low precision and memory: defaults, and what is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_parts import Workplace
from make_args import make_args, rule_problems

from slime.config import rules
from slime.config.machine import Machine
from slime.config.parser import ConfigError
from slime.config.resolve import validate
from slime.config.rules import Run
from slime.engines.launch import EngineSettings, EngineSpec
from slime.models.fp8_format import Fp8Format
from slime.plugins.sglang.launch import ServerPlace, server_options
from slime.weights.settings import WeightSyncSettings

GPU = Machine(gpus=1, cores=8, in_cluster=False)
CPU = Machine(gpus=0, cores=2, in_cluster=False)
FP8 = "--rollout-quantization fp8 "


@pytest.fixture(autouse=True)
def every_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao is an extra, which the tests of flags do not need."""
    monkeypatch.setattr(rules, "installed", lambda name: True)


def test_defaults(workplace: Workplace) -> None:
    args = workplace.load()
    assert args.rollout_quantization is None and not args.use_tis and args.train_dtype == "float32"
    assert (
        EngineSettings.from_args(args).fp8 is None
        and WeightSyncSettings.from_args(args).fp8 is None
    )


def test_quantized_engines_correct_their_samples(workplace: Workplace) -> None:
    args = workplace.load(FP8)
    assert args.use_tis and any("--use-tis is on" in notice for notice in args.notices)
    assert (
        EngineSettings.from_args(args).fp8
        == WeightSyncSettings.from_args(args).fp8
        == Fp8Format("block")
    )
    assert not workplace.load(FP8 + "--no-use-tis").use_tis
    assert not workplace.load(FP8 + "--use-rollout-logprobs").use_tis
    assert (
        workplace.load(FP8 + "--rollout-quantization-scale tensor").rollout_quantization_scale
        == "tensor"
    )


def test_float16(workplace: Workplace) -> None:
    args = workplace.load("--fp16")
    assert args.train_dtype == args.rollout_dtype == "float16"
    assert workplace.load("--offload-activations").gradient_checkpointing


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--rollout-quantization-scale tensor", "needs --rollout-quantization"),
        (
            FP8 + "--update-weight-mode delta --update-weight-transport disk "
            "--update-weight-disk-dir x",
            "delta exclude",
        ),
        (
            FP8 + "--rollout-external-engine-addrs 127.0.0.1:1",
            "--rollout-external-engine-addrs 127.0.0.1:1 exclude",
        ),
        ("--fp16 --train-dtype bfloat16", "--fp16 needs --train-dtype float16"),
        ("--fp16 --bf16", "--fp16 and"),
        ("--fp16 --train-backend megatron", "megatron-core"),
        (
            "--fp16 --initial-loss-scale 1 --min-loss-scale 2",
            "--initial-loss-scale 1.0 (below --min-loss-scale 2.0)",
        ),
        ("--loss-scale 8", "--loss-scale 8.0 needs"),
        ("--bf16-master-weights", "--bf16-master-weights needs --train-dtype bfloat16"),
        ("--optimizer-8bit --use-stateless-adam", "--use-stateless-adam and --optimizer-8bit"),
        ("--bf16-master-weights --train-dtype bfloat16 --lora-rank 4", "--lora-rank 4 exclude"),
        (
            "--optimizer-8bit --train-backend megatron",
            "--optimizer-8bit needs --train-backend fsdp",
        ),
        ("--fsdp-cpu-offload", "CPU memory"),
        ("--float8-training rowwise --train-dtype bfloat16", "8-bit floats"),
    ],
)
def test_what_cannot_be_had_is_refused(workplace: Workplace, line: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        workplace.load(line)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (dict(rollout_quantization_scale="channel"), "--rollout-quantization-scale"),
        (dict(sglang={"quantization": "fp8"}), "--sglang-quantization fp8"),
        (dict(rollout_dtype="float32"), "use --rollout-dtype bfloat16 or float16"),
    ],
)
def test_what_sglang_cannot_do_is_refused(flags: dict[str, object], said: str) -> None:
    given = (
        dict(rollout_quantization="fp8", rollout_backend="sglang", rollout_dtype="bfloat16") | flags
    )
    (problem,) = rule_problems(make_args(machine=GPU, **given), machine=GPU)
    assert "--rollout-quantization fp8" in problem and said in problem


def test_other_families_and_cpus_are_refused_for_sglang(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DeepseekV3ForCausalLM"]}))
    flags = dict(rollout_quantization="fp8", rollout_backend="sglang", rollout_dtype="bfloat16")
    args = make_args(machine=GPU, hf_checkpoint=str(tmp_path), **flags)
    (problem,) = rule_problems(args, machine=GPU)
    assert "DeepseekV3ForCausalLM" in problem
    assert any("--rollout-backend embedded" in problem for problem in rule_problems(args))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (problem,) = rule_problems(args, machine=GPU)
    assert "LlamaForCausalLM" in problem
    embedded = {**flags, "rollout_backend": "embedded"}
    problems = validate(Run(make_args(machine=GPU, hf_checkpoint=str(tmp_path), **embedded)))
    assert not any("--rollout-quantization" in problem for problem in problems)


def test_shards_over_all_ranks_are_no_replicas() -> None:
    flags = dict(train_backend="fsdp", bf16_master_weights=True, actor_num_gpus_per_node=2)
    args = make_args(machine=GPU, fsdp_shard_size=1, **flags)
    assert ["--fsdp-shard-size" in problem for problem in rule_problems(args)] == [True]
    assert not rule_problems(args.with_values(fsdp_shard_size=2))


def test_an_absent_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    args = make_args(machine=GPU, train_backend="fsdp", optimizer_8bit=True)
    monkeypatch.setattr(rules, "installed", lambda name: name != "torchao")
    (problem,) = rule_problems(args)
    assert "--optimizer-8bit needs the package torchao" in problem
    monkeypatch.setattr(rules, "installed", lambda name: True)
    assert not rule_problems(args), "it runs on a CPU, only not compiled"


def test_sglang_is_told_of_the_quantization() -> None:
    flags = dict(rollout_quantization="fp8", rollout_backend="sglang", rollout_dtype="bfloat16")
    settings = EngineSettings.from_args(
        make_args(machine=GPU, rollout_num_gpus_per_engine=2, **flags)
    )
    assert settings.fp8 == Fp8Format("block", ranks=2, key_value_heads=1)
    options = server_options(settings, EngineSpec(0, "/m"), ServerPlace("127.0.0.1", 1))
    assert options["quantization"] == "fp8" and options["dtype"] == "bfloat16"
    other = server_options(
        settings, EngineSpec(0, "/m", updates=False), ServerPlace("127.0.0.1", 1)
    )
    assert "quantization" not in other, "another model that is served beside it"
