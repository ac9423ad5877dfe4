"""``Args`` as users' functions get it, and ``make_args`` as tests do."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from make_args import make_args

from slime.config.args import FLAGS, Args
from slime.registry import sections


def test_a_copy_with_run_time_values_leaves_the_original_as_it_is() -> None:
    args = make_args(rollout_batch_size=4)
    later = args.with_values(num_rollout=12, sglang_router_ip="10.0.0.1")
    assert (later.num_rollout, later.sglang_router_ip, later.rollout_batch_size) == (
        12,
        "10.0.0.1",
        4,
    )
    assert (args.num_rollout, args.sglang_router_ip) == (None, None)


def test_a_copy_refuses_names_that_args_does_not_have() -> None:
    with pytest.raises(AttributeError, match=r"'num_rolout'.*did you mean num_rollout") as raised:
        make_args().with_values(num_rolout=12)
    assert "did you mean num_rollout" in str(pickle.loads(pickle.dumps(raised.value))), (
        "the message survives pickling"
    )


def test_made_args_are_resolved_as_after_parsing() -> None:
    args = make_args(rollout_batch_size=4, n_samples_per_prompt=2, world_size=3)
    assert (args.global_batch_size, args.over_sampling_batch_size, args.world_size) == (8, 4, 3)
    assert args.explicit == {"rollout_batch_size", "n_samples_per_prompt"}
    assert make_args(advantage_estimator="ppo").use_critic


def test_made_args_refuse_unknown_names_and_contradictions() -> None:
    with pytest.raises(TypeError, match="rollout_batchsize"):
        make_args(rollout_batchsize=4)
    with pytest.raises(ValueError, match="--global-batch-size 7"):
        make_args(global_batch_size=7)


def test_the_type_of_every_flag_says_whether_it_can_be_none() -> None:
    hints = {
        name: hint for one in (Args, *sections()) for name, hint in get_type_hints(one).items()
    }
    # what is refused or ignored is a table
    own = {name: flag for name, flag in FLAGS.items() if flag.status == "works"}
    optional = {name for name in own if type(None) in get_args(hints[name])}
    declared = {name for name, flag in own.items() if flag.default is None and not flag.derived}
    assert declared - optional == set(), (
        "None is their default and their type says that they are never None"
    )


def test_nothing_that_is_derived_is_none_after_parsing(workplace) -> None:
    for line in (
        "",
        "--debug-train-only --load-debug-rollout-data {rollout_id}.pt",
        "--debug-rollout-only",
        "--use-tis",
    ):
        args = workplace.load(line)
        assert [
            name for name, flag in FLAGS.items() if flag.derived and getattr(args, name) is None
        ] == []


def test_a_misspelt_name_raises_when_it_is_read_and_assigning_declares_it() -> None:
    args = make_args()
    with pytest.raises(
        AttributeError, match=r"'rollout_temprature'.*did you mean rollout_temperature"
    ):
        _ = args.rollout_temprature
    assert getattr(args, "of_nobody", 5) == 5
    args.rollout_temperature = 0.5
    args.of_nobody = 6
    assert (args.rollout_temperature, args.of_nobody, copy.deepcopy(args).of_nobody) == (0.5, 6, 6)
    assert args.with_values(seed=3).of_nobody == pickle.loads(pickle.dumps(args)).of_nobody == 6


def test_a_flag_that_was_not_given_never_shadows_a_default_of_the_users(workplace) -> None:
    args = workplace.load("--sglang-log-level debug")
    for name in [name for name, flag in FLAGS.items() if vars(args)[name] is None]:
        assert getattr(args, name, 15) == 15
        assert not hasattr(args, name)
        assert (getattr(args, name) or 15) == 15  # without a default, it is None as before
    assert (getattr(args, "max_turns", 15), args.max_turns, args.max_turns or 15) == (15, None, 15)
    assert getattr(args, "sglang_tool_call_parser", "qwen") == "qwen"
    assert getattr(args, "sglang_log_level", "info") == "debug"
    assert args.sglang_tool_call_parser is None
    assert dataclasses.asdict(args)["max_turns"] is copy.copy(args).max_turns is None
    given = workplace.load(
        f"--max-turns 3 --custom-config-path {workplace.write('own.yaml', 'reward_key: null')}"
    )
    assert (getattr(given, "max_turns", 15), hasattr(given, "max_turns")) == (3, True)
    assert getattr(given, "reward_key", "score") is None  # that is what the file says


def test_names_of_megatron_answer_with_its_backend_only() -> None:
    given = {"moe_router_dtype": "fp32"}
    args = make_args(megatron=given)
    assert args.moe_router_dtype == "fp32", "typed by the user"
    with pytest.raises(AttributeError, match="--recompute-method"):
        _ = args.recompute_method
    assert make_args(train_backend="megatron").recompute_method is None
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (1, 1), (
        "sizes hold with FSDP as well"
    )
    assert make_args().sglang_mem_fraction_static is None, (
        "defaults of the servers hold with every trainer"
    )


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_the_dimensions_of_the_model_are_true_with_every_backend(workplace, backend: str) -> None:
    args = make_args(
        hf_checkpoint=workplace.model, train_backend=backend, megatron={"num_layers": 2}
    )
    assert (args.hidden_size, args.vocab_size, args.num_attention_heads) == (2560, 151936, 32)
    assert (args.ffn_hidden_size, args.num_query_groups, args.kv_channels) == (9728, 8, 128)
    assert args.num_experts is None, "a dense model"
    assert args.num_layers == 2, "as typed"


def test_a_dimension_that_is_not_known_raises_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match=r"hidden_size needs config\.json of --hf-checkpoint"):
        _ = make_args().hidden_size
    args = make_args(hf_checkpoint=str(tmp_path))
    with pytest.raises(AttributeError, match=f"{tmp_path}"):
        _ = args.hidden_size
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    assert args.hidden_size == 8, "read as soon as it is there"
    with pytest.raises(AttributeError, match="has no num_hidden_layers"):
        _ = args.num_layers
