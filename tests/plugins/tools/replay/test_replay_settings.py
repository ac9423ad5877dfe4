"""What a replay takes from the folder of a run, which somebody else may have made: data, and no
code.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from make_args import make_args
from transformers import LlamaConfig

from slime.cli.main import main
from slime.config.args import FLAGS
from slime.config.passthrough import by_name
from slime.observability.run_dir import RunDir, public_settings
from slime.observability.run_state import Settled
from slime.plugins.tools.replay import ReplayError, read_run, settings
from slime.plugins.tools.replay.settings import holds_data

LEFT_OUT = frozenset((
    "output_dir", "run_name", "override", "custom_config_path", "prompt_data", "data_source_path",
    "buffer_filter_path", "dynamic_sampling_filter_path", "rollout_sample_hook_path", "rollout_sample_filter_path",
    "rollout_all_samples_process_path", "custom_eval_rollout_log_function_path",
    "custom_update_weight_post_write_path", "replay_schedule", "embedded_device", "sglang_router_ip",
    "rollout_external_engine_addrs", "sglang_config", "environment", "mcp_server", "agent_function_path",
    "agent_command", "agent_env", "agent_tool_parser", "agent_reasoning_parser", "agent_host", "custom_rm_path",
    "eval_reward_key", "verifier_env", "eval_prompt_data", "eval_config", "eval_function_path", "eval_input_key",
    "rubric", "prompt_mixture", "metrics_host", "distill_context", "distill_template", "critic_save",
    "eval_label_key", "eval_tool_key", "save", "save_hf", "tracker", "tracker_project", "tb_project_name",
    "tb_experiment_name", "wandb_dir", "wandb_key", "wandb_host", "wandb_team", "wandb_group", "wandb_project",
    "wandb_run_id", "log_samples", "save_debug_rollout_data", "load_debug_rollout_data", "load_forge_rollout_data",
    "save_debug_train_data", "dump_details", "memory_snapshot_dir", "config", "custom_model_provider_path",
    "rollout_task_type", "rollout_buffer_url", "ci_save_grad_norm", "ci_load_grad_norm",
    "megatron_deepgemm_forward_modules", "megatron_deepgemm_moe_forward_modules", "distributed_backend",
    "megatron_to_hf_mode", "qkv_format", "http_proxy", "fsdp_cpu_backend", "update_weight_local_checkpoint_dir",
))  # fmt: skip
"""Settings of generation, evaluation, snapshots and outputs, which a replay does not take. The files
that they name may be gone, too.
"""
MEGATRON_LEFT_OUT = frozenset(("config_logger_dir", "tokenizer_type", "tokenizer_model"))

EVIL = (
    "from pathlib import Path\n"
    "Path(__file__).with_name('ran').touch()\n"
    "def f(*args, **keywords): raise SystemExit\n"
)


def folder_of_a_run(folder: Path, **changes: Any) -> Path:
    """A run of one step, started in ``folder``, whose recorded settings somebody has changed."""
    model = folder / "model"
    LlamaConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2).save_pretrained(model)
    (model / "model.safetensors").touch()
    for name in ("evil.py", "signal.py", "sitecustomize.py", "flash_attn.py"):
        (folder / name).write_text(EVIL)
    recorded = public_settings(vars(make_args(hf_checkpoint=str(model))))
    recorded |= {"save_debug_rollout_data": "{rollout_id}.pt", **changes}
    settled = Settled(False, False, 9, 2, 4096, 4096, 0, None, str(folder))
    line = {"settled": vars(settled), "settings": recorded}
    RunDir(folder).config.write_text("{}")
    RunDir(folder).attempts.write_text(json.dumps(line) + "\n")
    (folder / "0.pt").touch()
    return folder


def test_every_setting_belongs_to_one_kind() -> None:
    for name, flag in FLAGS.items():
        kinds = (settings.TEXTS, LEFT_OUT, settings.STOOD_FOR, settings.RUNS_CODE)
        assert holds_data(flag) + sum(name in kind for kind in kinds) == 1, (
            f"{name} belongs to none, or to several"
        )
    for name, option in by_name("megatron").items():
        kinds = (
            settings.MEGATRON_TEXTS,
            MEGATRON_LEFT_OUT,
            settings.MEGATRON_CODE,
            frozenset(),
        )
        assert holds_data(option.flag) + sum(name in kind for kind in kinds) == 1, name
    hooks = {
        name for name, flag in FLAGS.items() if flag.kind in ("hook", "repeat") or flag.or_hook
    }
    assert not hooks & settings.TEXTS


HOOKS = sorted(
    name
    for name, flag in FLAGS.items()
    if (flag.kind == "hook" or flag.or_hook) and name in settings.RUNS_CODE
)


@pytest.mark.parametrize(
    "hostile",
    [
        *({name: "evil.py:f"} for name in HOOKS),
        {"custom_loss_function_path": "evil.f"},
        {"custom_loss_function_path": "evil:f"},
        {"custom_loss_function_path": "slime.config.hooks.load_function"},
        {"loss_type": "custom_loss", "custom_loss_function_path": "evil.py"},
        {"train_env_vars": {"PYTHONPATH": "."}},
        {"train_env_vars": {"A": "***", "LD_PRELOAD": "./evil.so"}},
        {"train_env_vars": "PYTHONPATH=."},
        {"megatron_config_path": "roles.yaml"},
        {"attn_implementation": "someone/kernel"},
        {"trust_remote_code": True, "hf_checkpoint": "somebody/model"},
        {"megatron": {"spec": ["evil", "f"]}},
        {"megatron": {"fp8_quantizer_factory": "evil.f"}},
    ],
    ids=str,
)
def test_code_that_a_folder_names_is_refused_by_its_name(
    tmp_path: Path, hostile: dict[str, Any]
) -> None:
    folder = folder_of_a_run(tmp_path, **hostile)
    with pytest.raises(ReplayError, match="--run-its-code") as refused:
        read_run(folder, 0)
    names = hostile.get("megatron", hostile)
    assert any(name in str(refused.value) for name in names)
    assert not list(folder.rglob("ran"))


@pytest.mark.parametrize(
    "hostile",
    [
        dict.fromkeys(sorted(settings.STOOD_FOR), "evil.py:f"),
        {"rollout_function_path": "slime.rollout./evil.py:f"},
        {"rollout_function_path": "slime.rollout.x/../../evil.py:f"},
        {"data_source_path": "evil.py:f"},
        {"custom-loss-function-path": "evil.py:f"},
        {"--custom-loss-function-path": "evil.py:f"},
        {"megatron": {"custom_loss_function_path": "evil.py:f", "trust_remote_code": True}},
        {"sglang": {"x": 1}, "router": 3, "megatron": ["custom_loss_function_path"]},
        {"override": "evil.yaml", "custom_config_path": "evil.yaml"},
        {
            "tracker": ["evil.py:f"],
            "rollout_sample_hook_path": ["evil.py:f"],
            "custom_rm_path": "evil.py:f",
        },
        {
            "save_debug_train_data": "evil.txt",
            "dump_details": "evil",
            "save_hf": "evil",
            "output_dir": "evil",
        },
        {"trust_remote_code": True},
        {"train_env_vars": {"OMP_SCHEDULE": "***"}},
        {"own_setting": 3, "__class__": "evil"},
    ],
    ids=str,
)
def test_what_a_replay_does_not_use_is_not_taken(tmp_path: Path, hostile: dict[str, Any]) -> None:
    folder = folder_of_a_run(tmp_path, **hostile)
    run = read_run(folder, 0)
    args = run.args
    assert run.unrecorded == (("OMP_SCHEDULE",) if "train_env_vars" in hostile else ())
    assert not args.trust_remote_code and not args.train_env_vars
    assert "evil" not in str(vars(args))
    assert not list(folder.rglob("ran"))


def test_built_in_estimators_and_attentions_are_those_of_the_run(tmp_path: Path) -> None:
    own = {"advantage_estimator": "gspo", "attn_implementation": "eager"}
    args = read_run(folder_of_a_run(tmp_path, **own), 0).args
    assert (args.advantage_estimator, args.attn_implementation) == ("gspo", "eager")


def test_a_run_in_one_process_is_replayed_on_any_number_of_ranks(tmp_path: Path) -> None:
    run = read_run(
        folder_of_a_run(tmp_path, inline=True), 0, flags=["--actor-num-gpus-per-node", "2"]
    )
    assert run.args.actor_num_gpus_per_node == 2


def test_giving_the_variables_whose_values_the_run_did_not_record_is_no_change(
    tmp_path: Path,
) -> None:
    folder = folder_of_a_run(tmp_path, train_env_vars={"A": "***"})
    run = read_run(folder, 0, flags=["--train-env-vars", '{"A": "1"}'])
    assert (dict(run.changes), run.unrecorded, run.args.train_env_vars) == ({}, (), {"A": "1"})
    assert "train_env_vars" in read_run(folder, 0, flags=["--train-env-vars", '{"B": "1"}']).changes


def test_model_code_is_run_only_if_the_caller_allows_it(tmp_path: Path) -> None:
    folder = folder_of_a_run(tmp_path, trust_remote_code=True)
    (folder / "model" / "modeling.py").write_text(EVIL)
    with pytest.raises(ReplayError, match=f"trust_remote_code: {folder}/model/modeling.py"):
        read_run(folder, 0)
    told: list[str] = []
    run = read_run(folder, 0, run_its_code=told.extend)
    assert run.args.trust_remote_code and told == [f"trust_remote_code: {folder}/model/modeling.py"]


def test_allowed_code_is_listed_before_it_runs_and_reads_the_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    hooks = {
        "custom_tis_function_path": "evil.py:f",
        "custom_loss_function_path": "evil.f",
        "loss_type": "custom_loss",
    }
    folder = folder_of_a_run(
        tmp_path, **hooks, own_setting=3, train_env_vars={"A": "1", "MY_API_KEY": "s3cret"}
    )
    told: list[str] = []

    def tell(lines: list[str]) -> None:
        assert not (folder / "ran").exists()
        told.extend(lines)

    run = read_run(folder, 0, run_its_code=tell)
    assert run.args.own_setting == 3 and run.modules == (str(folder),)
    assert run.args.custom_tis_function_path == f"{folder}/evil.py:f"
    assert told == [
        "train_env_vars: A=1", "train_env_vars: MY_API_KEY=***",
        f"custom_loss_function_path: evil.f ({folder}/evil.py)", f"custom_tis_function_path: {folder}/evil.py:f",
    ]  # fmt: skip


def test_a_flag_of_the_caller_takes_the_place_of_code(tmp_path: Path) -> None:
    folder = folder_of_a_run(
        tmp_path, train_env_vars={"PYTHONPATH": "."}, custom_tis_function_path="evil.py:f"
    )
    mine = tmp_path / "mine.py"
    mine.write_text("def tis(*args):\n    pass\n")
    flags = ["--train-env-vars", "{}", "--custom-tis-function-path", f"{mine}:tis"]
    assert read_run(folder, 0, flags).args.custom_tis_function_path == f"{mine}:tis"


def test_relative_paths_refer_to_the_folder_in_which_the_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of_a_run(tmp_path / "run", hf_checkpoint="model", ref_load="model")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = read_run(folder, 0)
    assert run.args.hf_checkpoint == run.args.ref_load == str(folder / "model") and run.dumps == {0}
    assert Path.cwd() == tmp_path / "elsewhere"


@pytest.mark.parametrize("place", ["\0", "x" * 5000, "~nobody-of-this-name/x", "/dev/zero"])
def test_a_path_that_no_file_can_have_is_refused_in_words(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of_a_run(tmp_path, hf_checkpoint=place)
    assert main(["replay", str(folder), "--step", "0"]) == 1
    assert capsys.readouterr().err.startswith("slime replay: ")
