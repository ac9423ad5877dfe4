"""What vLLM's servers are started with, and what of a run is refused before one is. vLLM need not
be installed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from make_args import make_args

from slime.config import passthrough
from slime.config.args import Args
from slime.config.machine import Machine
from slime.config.parser import read_command_line
from slime.config.passthrough import command_line
from slime.engines.launch import EngineSettings, EngineSpec
from slime.engines.sglang_api import Capabilities, choose_api_version
from slime.plugins.vllm import launch
from slime.plugins.vllm.options import VLLM, check

SPEC = EngineSpec(3, "/m", num_gpus=2)


def words(monkeypatch: pytest.MonkeyPatch, gpus: int, **changes: Any) -> str:
    machine = Machine(gpus=gpus, cores=2, in_cluster=False)
    monkeypatch.setattr(launch, "this_machine", lambda: machine)
    args = make_args(machine=machine, rollout_backend="vllm", hf_checkpoint="/m", **changes)
    settings = EngineSettings.from_args(args)
    return " ".join(command_line("vllm", launch.server_options(settings, SPEC)))


def test_words_of_a_server_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    line = words(
        monkeypatch, 4, vllm={"max_model_len": "4k", "enable_prefix_caching": False}, rollout_seed=40,
        offload_rollout=True, trust_remote_code=True, train_dtype="bfloat16",
    )  # fmt: skip
    for part in (
        "--model /m", "--tensor-parallel-size 2", "--seed 43", "--dtype bfloat16", "--trust-remote-code",
        "--enable-sleep-mode", "--max-model-len 4k", "--no-enable-prefix-caching",
        "--logprobs-mode processed_logprobs",
    ):  # fmt: skip
        assert part in line, line
    assert "enforce-eager" not in line


def test_words_of_a_server_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    line = words(monkeypatch, 0, vllm={"kv_cache_memory_bytes": "64M"}, rollout_top_p=0.9)
    assert "--enforce-eager" in line and "--kv-cache-memory-bytes 64M" in line
    assert "--logprobs-mode raw_logprobs" in line, "those of a cut vocabulary are of no use"


def test_a_server_has_room_for_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = {"lora_rank": 9, "lora_sync": "adapter", "lora_target_modules": ["all-linear"]}
    assert "--enable-lora --max-lora-rank 16" in words(monkeypatch, 1, **adapter)
    assert "lora" not in words(monkeypatch, 1, **(adapter | {"lora_sync": "merged"}))


def test_flags_land_in_args_without_vllm() -> None:
    args, problems = read_command_line(["--vllm-max-num-seqs", "7", "--vllm-no-enforce-eager"])
    assert problems == [] and args.vllm == {"max_num_seqs": 7, "enforce_eager": False}
    assert args.vllm_max_num_seqs == 7 and "vllm" not in sys.modules


@pytest.mark.parametrize("name", [name for why in VLLM.reasons.values() for name in why])
def test_what_slime_refuses_is_an_option_of_vllm(name: str) -> None:
    assert name in passthrough.by_name("vllm")
    args = make_args(rollout_backend="vllm", hf_checkpoint="/m", vllm={name: "x"})
    ((problem,), _) = passthrough.check(vars(args), "vllm")
    assert problem.startswith(f"--vllm-{name.replace('_', '-')} is ")


def test_flags_of_an_engine_that_does_not_run_are_told() -> None:
    args = make_args(rollout_backend="embedded", vllm={"max_num_seqs": 7})
    problems, notices = passthrough.check(vars(args), "embedded")
    assert problems == []
    assert any("--vllm-max-num-seqs" in notice for notice in notices)


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill_num_servers": 1},
        {"use_rollout_routing_replay": True},
        {"rollout_quantization": "fp8"},
        {"update_weight_mode": "delta"},
        {"lora_sync": "adapter", "lora_rank": 513},
        {"rollout_top_p": 0.9, "rollout_temperature": 0.7},
        {"colocate": True, "rollout_num_gpus_per_engine": 2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_vllm_cannot_do_is_refused_with_a_reason(changes: dict[str, Any]) -> None:
    plain = make_args(rollout_backend="vllm", hf_checkpoint="/m")
    assert check(plain) == []
    args: Args = plain.with_values(**changes)
    (problem,) = check(args)
    assert problem.count("vllm") and "\n" not in problem
    assert check(args.with_values(rollout_backend="sglang")) == []


def test_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    args = make_args(rollout_backend="vllm", hf_checkpoint="/m")
    assert check(args.with_values(hf_checkpoint=str(tmp_path)))


def test_an_engine_says_what_it_is_and_can() -> None:
    info = {
        "engine": "vllm",
        "version": "0.32.0",
        "capabilities": ["retract", "of another release"],
    }
    api = choose_api_version(info, "http://x")
    assert api.kind == "vllm" and api.capabilities == Capabilities(retract=True)
