"""What is derived when a flag is not given."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from config_parts import Workplace
from hypothesis import given
from hypothesis import strategies as st
from make_args import make_args

from slime.backends.lr_schedule import LrSchedule
from slime.config import machine as machine_module
from slime.config.args import Args
from slime.config.machine import Machine, count_gpus
from slime.config.resolve import resolve_defaults
from slime.config.rollout import SFT_FUNCTION, has_rewards
from slime.config.rules import Run

LAPTOP = Machine(gpus=0, cores=2, in_cluster=False)
NODE = Machine(gpus=8, cores=64, in_cluster=False)
ONE_GPU = Machine(gpus=1, cores=16, in_cluster=False)


def test_the_seeds_quick_start_has_all_it_needs(workplace) -> None:
    args = workplace.load(
        "--num-rollout 3000 --use-kl-loss --kl-loss-coef 0.001 --global-batch-size 256"
    )
    assert (args.rollout_batch_size, args.n_samples_per_prompt, args.num_steps_per_rollout) == (
        32,
        8,
        1,
    )
    assert (args.input_key, args.label_key, args.rollout_max_response_len, args.rm_type) == (
        "prompt",
        "label",
        1024,
        "math",
    )
    assert args.ref_load == args.hf_checkpoint == workplace.model
    assert (args.train_backend, args.rollout_backend) == ("fsdp", "embedded")
    assert (args.actor_num_gpus_per_node, args.rollout_num_gpus, args.world_size) == (1, 1, 1)
    assert (args.train_dtype, args.rollout_dtype, args.embedded_device) == (
        "float32",
        "float32",
        "cpu",
    )
    assert args.use_tensorboard and args.num_rollout == 3000
    assert any("--rm-type is math" in notice for notice in args.notices)


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 2), (3, 2), (8, 4), (192, 96)])
def test_verifiers_take_half_of_the_cores_of_the_machine_that_judges(
    monkeypatch: pytest.MonkeyPatch, cores: int, workers: int
) -> None:
    """That need not be the driver's, so the flag stays without a value."""
    from slime.rollout.verifier import pool

    monkeypatch.setattr(pool.os, "sched_getaffinity", lambda pid: set(range(cores)))
    started: list[int] = []
    monkeypatch.setattr(
        pool, "VerifierPool", lambda count, *_: started.append(count) or SimpleNamespace(close=int)
    )
    monkeypatch.setattr(pool, "shared_pools", {})
    args = make_args(hf_checkpoint=None)
    resolve_defaults(Run(args))
    pool.shared_pool(args.reward_workers)
    assert started == [workers]


def test_conversations_are_trained_once_unless_copies_are_asked_for() -> None:
    once, copies = (
        make_args(loss_type="sft_loss"),
        make_args(loss_type="sft_loss", n_samples_per_prompt=4),
    )
    assert (once.n_samples_per_prompt, once.global_batch_size) == (1, once.rollout_batch_size)
    assert (
        copies.n_samples_per_prompt == 4
        and make_args(loss_type="custom_loss").n_samples_per_prompt == 8
    )


@given(st.integers(1, 64), st.integers(1, 32), st.integers(1, 8))
def test_batch_equation_holds_whatever_was_given(prompts: int, samples: int, steps: int) -> None:
    total = prompts * samples
    for given_size, given_steps in ((None, None), (None, steps), (max(total // steps, 1), None)):
        args = Args(rollout_batch_size=prompts, n_samples_per_prompt=samples)
        args.global_batch_size, args.num_steps_per_rollout = given_size, given_steps  # type: ignore[assignment]
        problems = resolve_defaults(Run(args, machine=LAPTOP))
        if problems:
            assert total % (given_size or steps) and str(total) in problems[0]
        else:
            assert args.global_batch_size * args.num_steps_per_rollout == total


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            "--rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 250",
            "--rollout-batch-size 32 x --n-samples-per-prompt 8 = 256, which is not a multiple "
            "of --global-batch-size 250; 256 would fit",
        ),
        (
            "--rollout-batch-size 4 --n-samples-per-prompt 4 --global-batch-size 8 "
            "--num-steps-per-rollout 3",
            "--rollout-batch-size 4 x --n-samples-per-prompt 4 = 16, but --global-batch-size 8 x "
            "--num-steps-per-rollout 3 = 24: leave out one of the last two flags; its value "
            "follows from the others",
        ),
        (
            "--rollout-batch-size 3 --n-samples-per-prompt 3 --num-steps-per-rollout 2",
            "--rollout-batch-size 3 x --n-samples-per-prompt 3 = 9 samples cannot be split into "
            "--num-steps-per-rollout 2 equal steps",
        ),
    ],
)
def test_impossible_batches_show_the_equation(workplace, line: str, problem: str) -> None:
    assert workplace.problems(line) == [problem]


def test_a_gpu_node_without_placement_is_shared(workplace) -> None:
    workplace.use(NODE)
    args = workplace.load()
    assert args.colocate and args.offload_train and args.offload_rollout
    assert (args.actor_num_gpus_per_node, args.rollout_num_gpus, args.train_dtype) == (
        8,
        8,
        "bfloat16",
    )
    args = workplace.load(asynchronous=True)
    assert not args.colocate and (args.actor_num_gpus_per_node, args.rollout_num_gpus) == (4, 4)
    args = workplace.load("--rollout-num-gpus 2 --use-dynamic-batch-size --max-tokens-per-gpu 4096")
    assert not args.colocate and args.actor_num_gpus_per_node == 6
    args = workplace.load("--rollout-external-engine-addrs 10.0.0.1:30000")
    assert not args.colocate and not args.offload_rollout and args.actor_num_gpus_per_node == 8


def test_colocation_sets_both_offloads_unless_told_otherwise(workplace) -> None:
    args = workplace.load("--colocate --no-offload-train")
    assert (args.offload_train, args.offload_rollout) == (False, True)
    args = workplace.load()
    assert (args.offload_train, args.offload_rollout) == (False, False)
    args = workplace.load("--offload")
    assert (args.offload_train, args.offload_rollout) == (True, True)
    args = workplace.load("--colocate --no-offload-train --advantage-estimator ppo --lr 1e-5")
    assert args.offload_train and [x for x in args.notices if "--no-offload-train" in x]


def test_ppo_brings_the_critic(workplace) -> None:
    args = workplace.load("--advantage-estimator ppo --lr 1e-5")
    assert args.use_critic and args.critic_lr == 1e-5
    assert not workplace.load().use_critic


def test_the_critic_warms_up_like_the_actor_unless_told_otherwise(workplace) -> None:
    def steps(flags: str) -> list[int]:
        args = workplace.load(f"--advantage-estimator ppo --num-rollout 100 {flags}")
        return [LrSchedule.from_args(args, role).warmup_steps for role in ("actor", "critic")]

    assert (
        steps("--lr-warmup-fraction 0.1")
        == steps("--warmup-ratio 0.1")
        == steps("--lr-warmup-iters 10")
        == [10, 10]
    )
    assert steps("--lr-warmup-fraction 0.1 --critic-lr-warmup-iters 0") == [10, 0]
    assert steps("--lr-warmup-iters 10 --critic-lr-warmup-iters 3") == [10, 3]


def test_save_interval_alone_saves_in_the_runs_folder(workplace) -> None:
    args = workplace.load("--save-interval 100 --run-name mine")
    assert args.save == "outputs/mine/checkpoints"
    assert workplace.load().save is None


def test_a_resumed_run_goes_on_in_its_own_folder(workplace) -> None:
    folder = workplace.root / "outputs" / "earlier" / "checkpoints"
    folder.mkdir(parents=True)
    assert workplace.load(f"--load {folder} --save {folder}").run_name == "earlier"
    fresh = workplace.load().run_name
    assert fresh.startswith("model-grpo-20")


def test_a_function_that_evaluates_needs_no_data(workplace) -> None:
    code = "def evaluate(args, rollout_id, data_source, evaluation=False): return {}\n"
    args = workplace.load(
        f"--eval-interval 2 --eval-function-path {workplace.write('mine.py', code)}:evaluate"
    )
    assert args.eval_interval == 2 and not any("evaluate" in notice for notice in args.notices)


def test_the_paths_of_slimes_own_functions_are_the_same_in_both_forms(workplace) -> None:
    own = "slime.rollout.fully_async_rollout"
    args = workplace.load(
        f"--rollout-function-path {own}:generate_rollout_fully_async", asynchronous=True
    )
    assert args.rollout_function_path == f"{own}.generate_rollout_fully_async"
    assert args.eval_function_path == "slime.rollout.sglang_rollout.generate_rollout"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--custom-tis-function-path mine.py:f", "needs --use-tis"),
        ("--custom-tis-function-path mine.py:f --use-tis", ""),
        ("--custom-tis-function-path mine.py:f --custom-config-path own.yaml", ""),
        (
            "--custom-update-weight-post-write-path mine.py:g",
            "needs --update-weight-transport disk",
        ),
        (
            "--custom-reward-post-process-path mine.py:h "
            "--custom-convert-samples-to-train-data-path mine.py:h",
            "the first is never called",
        ),
    ],
)
def test_a_function_that_is_never_called_is_told(workplace, flags: str, why: str) -> None:
    code = (
        "def f(args, **more): pass\n"
        "def g(args, folder, engines): pass\n"
        "def h(args, samples): pass\n"
    )
    line = flags.replace("mine.py", workplace.write("mine.py", code))
    line = line.replace("own.yaml", workplace.write("own.yaml", "use_rs: true\n"))
    told = [notice for notice in workplace.load(line).notices if "has no effect" in notice]
    assert len(told) == bool(why) and why in "".join(told)


def test_eval_interval_without_data_is_one_notice(workplace) -> None:
    args = workplace.load("--eval-interval 50")
    assert args.eval_interval is None
    assert len([notice for notice in args.notices if "--eval-prompt-data" in notice]) == 1


def test_eval_settings_fall_back_to_the_rollouts(workplace) -> None:
    args = workplace.load("--rollout-max-response-len 99 --eval-temperature 0 --input-key prompt")
    assert (args.eval_max_response_len, args.eval_temperature, args.eval_top_p) == (99, 0.0, 1.0)
    assert (args.eval_input_key, args.eval_label_key) == ("prompt", "label")
    assert args.eval_function_path == args.rollout_function_path


def test_rows_choose_keys_and_reward(workplace) -> None:
    data = workplace.write("other.jsonl", json.dumps({"input": "hi", "answer": "4"}) + "\n")
    line = f"--prompt-data {data}"
    args = workplace.load(f"{line} --rm-type random")
    assert (args.input_key, args.label_key) == ("input", "label")
    args = workplace.load(f"{line} --label-key answer")
    assert (args.label_key, args.rm_type) == ("answer", "math")


def test_the_first_row_alone_decides_nothing_about_the_labels_of_others(
    workplace: Workplace,
) -> None:
    data = workplace.write("some.jsonl", '{"prompt": "hi"}\n{"prompt": "2+2", "label": "4"}\n')
    args = workplace.load(f"--prompt-data {data} --rm-type random")
    assert (args.label_key, args.eval_label_key) == ("label", "label"), (
        "evaluation data may have labels as well"
    )


def test_a_label_may_be_inside_of_an_object(workplace: Workplace) -> None:
    data = workplace.write(
        "nested.jsonl", '{"prompt": "2+2", "reward_model": {"ground_truth": "4"}}\n'
    )
    assert (
        workplace.load(f"--prompt-data {data} --label-key reward_model.ground_truth").rm_type
        == "math"
    )


@pytest.mark.parametrize("row", ['{"prompt": "2+2", "label": "4"}', '{"prompt": "2+2"}'])
def test_the_url_of_a_reward_server_is_enough(workplace: Workplace, row: str) -> None:
    data = workplace.write("rows.jsonl", row + "\n")
    args = workplace.load(f"--prompt-data {data} --rm-url http://127.0.0.1:9/score")
    assert args.rm_type == "remote_rm" and any("--rm-url" in notice for notice in args.notices)


def test_the_first_row_may_begin_with_a_byte_order_mark(workplace: Workplace) -> None:
    data = workplace.root / "mark.jsonl"
    data.write_text('{"input": "2+2", "label": "4"}\n', encoding="utf-8-sig")
    args = workplace.load(f"--prompt-data {data}")
    assert (args.input_key, args.rm_type) == ("input", "math")


def test_parquet_rows_are_seen_too(workplace) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = workplace.root / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "hi", "label": "4"}]), file)
    assert workplace.load(f"--prompt-data {file}@[0:1]").rm_type == "math"


def test_the_checkpoint_may_come_by_load_or_ref_load(workplace) -> None:
    from slime.config.parser import load_args

    args = load_args(["--prompt-data", workplace.data, "--ref-load", workplace.model])
    assert args.hf_checkpoint == workplace.model
    assert any("--hf-checkpoint" in notice for notice in args.notices)


def test_answers_that_are_imitated_have_no_rewards() -> None:
    """Those that the run generates have, whatever the loss."""
    rollout = {"rollout_function_path": SFT_FUNCTION}
    for loss, more in (("sft_loss", rollout), ("dpo", {}), ("kto", {}), ("reward_model", {})):
        args = make_args(loss_type=loss, **more)
        assert not has_rewards(args, args.rollout_function_path), loss
    for loss in ("sft_loss", "policy_loss"):
        args = make_args(loss_type=loss)
        assert has_rewards(args, args.rollout_function_path), loss


def test_recompute_flags_mean_gradient_checkpointing(workplace) -> None:
    for line in (
        "--recompute-activations",
        "--recompute-granularity full",
        "--gradient-checkpointing",
    ):
        assert workplace.load(line).gradient_checkpointing
    assert not workplace.load().gradient_checkpointing


def test_made_args_are_resolved_and_reject_unknown_names() -> None:
    args = make_args(rollout_batch_size=4, n_samples_per_prompt=2)
    assert (args.global_batch_size, args.over_sampling_batch_size) == (8, 4)
    with pytest.raises(TypeError, match="rollout_batchsize"):
        make_args(rollout_batchsize=4)
    with pytest.raises(TypeError, match="sglang_mem_fraction_static"):
        make_args(sglang_mem_fraction_static=0.8)
    assert make_args(sglang={"mem_fraction_static": 0.7}).sglang_mem_fraction_static == 0.7


def test_gpus_are_counted_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "torch_is_cpu_build", lambda: False)
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert count_gpus(tmp_path) == 3
    for visible, count in (
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("0,2,5", 3),
        ("GPU-a,GPU-b", 2),
        ("1,-1,2", 1),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert count_gpus(tmp_path) == count
    monkeypatch.setattr(machine_module, "torch_is_cpu_build", lambda: True)
    assert count_gpus(tmp_path) == 0


@pytest.mark.parametrize(
    ("line", "kind", "told"),
    [
        ("--use-kl-loss --kl-loss-coef 0.001", "low_var_kl", False),
        ("--use-kl-loss --kl-loss-coef 0.001 --kl-loss-type k1", "k1", True),
        ("--use-kl-loss --kl-loss-coef 0.001 --kl-loss-type k1 --use-unbiased-kl", "k1", False),
        ("--use-kl-loss --kl-loss-coef 0.001 --kl-loss-type k2", "k2", False),
        ("--kl-coef 0.1 --advantage-estimator ppo", "k1", False),
        ("--kl-coef 0.1 --kl-loss-type k3 --advantage-estimator ppo", "k3", False),
    ],
)
def test_the_kl_in_the_loss_regularises_by_default(
    workplace, line: str, kind: str, told: bool
) -> None:
    args = workplace.load(line)
    assert args.kl_loss_type == kind
    assert any("regularize" in notice for notice in args.notices) == told


def test_the_first_update_is_checked_where_one_more_update_is_cheap(tmp_path: Path) -> None:
    def checked(config: dict[str, object] | None = None, **given: Any) -> bool:
        (tmp_path / "config.json").write_text(json.dumps(config or {}))
        given = {"rollout_backend": "sglang", "hf_checkpoint": str(tmp_path), **given}
        return make_args(**given).check_weight_update_equal

    assert checked() and checked(rollout_backend="embedded", check_weight_update_equal=True)
    assert not checked(rollout_backend="embedded"), "it names each tensor that differs anyway"
    assert not checked(update_weight_transport="disk") and not checked(audit_weights=False)
    assert not checked({"vision_config": {}}) and not checked({"quantization_config": {}})
    assert not checked(sglang={"speculative_algorithm": "EAGLE"}) and not checked(
        check_weight_update_equal=False
    )


def test_micro_batches_hold_tokens_unless_the_user_counts_samples() -> None:
    args = make_args()
    assert args.use_dynamic_batch_size and args.balance_data and args.max_tokens_per_gpu == 4096
    assert make_args(max_tokens_per_gpu=512).max_tokens_per_gpu == 512
    args = make_args(micro_batch_size=1)
    assert (
        not args.use_dynamic_batch_size
        and not args.balance_data
        and args.max_tokens_per_gpu is None
    )
    assert make_args(micro_batch_size=1, use_dynamic_batch_size=True).use_dynamic_batch_size
    assert not make_args(attn_implementation="sdpa").use_dynamic_batch_size, (
        "padding is not counted"
    )
    assert not make_args(balance_data=False).balance_data


def test_passes_without_a_backward_have_the_budget_of_training_unless_one_is_given() -> None:
    assert make_args(max_tokens_per_gpu=512).log_probs_max_tokens_per_gpu == 512
    assert (
        make_args(
            max_tokens_per_gpu=512, log_probs_max_tokens_per_gpu=2048
        ).log_probs_max_tokens_per_gpu
        == 2048
    )
    assert make_args(micro_batch_size=1).log_probs_max_tokens_per_gpu is None, (
        "training's micro-batches"
    )


def test_the_token_budget_follows_from_the_longest_sample() -> None:
    assert make_args(rollout_max_response_len=8192).max_tokens_per_gpu == 8192
    assert (
        make_args(rollout_max_response_len=8192, rollout_max_prompt_len=1024).max_tokens_per_gpu
        == 9216
    )
    assert (
        make_args(rollout_max_response_len=8192, rollout_max_context_len=8000).max_tokens_per_gpu
        == 8000
    )
    megatron = {"context_parallel_size": 2}
    assert make_args(rollout_max_response_len=16384, megatron=megatron).max_tokens_per_gpu == 8192


def test_a_critic_with_gpus_of_its_own_leaves_the_others_to_the_actor(workplace) -> None:
    workplace.use(NODE)
    ppo = "--advantage-estimator ppo --critic-num-gpus-per-node 3"
    args = workplace.load(ppo)
    assert (args.critic_gpus, args.world_size, args.rollout_num_gpus) == (3, 5, 5)
    (problem,) = workplace.problems(f"{ppo} --actor-num-gpus-per-node 6 --colocate")
    assert problem.startswith("the run needs 9 GPUs")
    assert workplace.load("--critic-num-nodes 2").critic_gpus == 0  # no critic
    as_many = workplace.load(
        "--advantage-estimator ppo --critic-num-nodes 2 --actor-num-gpus-per-node 2"
    )
    assert as_many.critic_gpus == 4
    refused = workplace.problems(f"{ppo} --inline --actor-num-gpus-per-node 1")
    assert any("--inline and --critic-num" in problem for problem in refused)


@pytest.mark.parametrize(("inline", "backend"), [(True, "fsdp"), (False, "megatron")])
def test_one_process_has_a_backend_that_can_run_in_it(
    monkeypatch: pytest.MonkeyPatch, inline: bool, backend: str
) -> None:
    """On a machine with a GPU and every package, where Megatron is the default otherwise."""
    monkeypatch.setattr("slime.config.run.installed", lambda name: True)
    machine = Machine(gpus=1, cores=8, in_cluster=False)
    assert make_args(machine=machine, inline=inline).train_backend == backend
