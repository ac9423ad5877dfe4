"""Cross-field checks: each says what is wrong and what to change, and all are told together."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_parts import Workplace
from make_args import make_args, rule_problems

from slime.config.cluster import environment_texts
from slime.config.engine import OUTER_CACHE, OUTER_CACHES
from slime.config.hooks import load_function
from slime.config.machine import Machine
from slime.config.rollout import DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC_FUNCTION, may_use_workers
from slime.config.rules import Run, idle_flags

LAPTOP = Machine(gpus=0, cores=2, in_cluster=False)
FOUR_GPUS = Machine(gpus=4, cores=32, in_cluster=False)

ONE_PROBLEM = [
    ("--kl-loss-coef 0.1", "needs --use-kl-loss"),
    ("--advantage-estimator reinforce_plus_plus", "needs --normalize-advantages"),
    ("--advantage-estimator reinforce_plus_plus_baseline", "needs --normalize-advantages"),
    (
        "--custom-pg-loss-reducer-function-path slime.algorithms.dr_grpo:pg_loss_reducer "
        "--calculate-per-token-loss",
        "by a constant",
    ),
    ("--overlong-buffer-len 5000", "--rollout-max-response-len"),
    ("--opd-teacher-load /nowhere --use-opd --opd-type megatron", "--opd-teacher-load /nowhere: "),
    ("--embedded-device gpu", "cpu or cuda"),
    ("--n-samples-per-prompt 1", "every advantage would be 0"),
    ("--num-critic-only-steps 2", "--advantage-estimator ppo"),
    ("--eps-clip-c 0.5", "above 1"),
    ("--log-samples some", "must be all, none, or the number"),
    ("--log-samples -3", "must be all, none, or the number"),
    ("--log-keep-last 0", "--log-keep-last"),
    ("--sglang-api-key k --rollout-backend sglang --sglang-tokenizer-worker-num 2", "key with"),
    ("--sglang-ssl-certfile k", "plain HTTP"),
    ("--router-jwt-issuer k", "web tokens"),
    ("--router-tls-key-path k", "plain HTTP"),
    ("--eps-clip -0.1 --eps-clip-high 0.2", "at least 0"),
    ("--gamma 1.5", "from 0 to 1"),
    ("--use-rollout-logprobs --use-tis", "--use-tis exclude"),
    ("--tis-clip 1 --tis-clip-low 2", "must be above"),
    ("--freeze-params-name-list *mlp", "'*mlp' is"),
    ("--lora-rank 4 --lora-target-modules q_proj (k", "'(k' is"),
    ("--min-lr 1 --lr 0.1", "above --lr"),
    ("--min-lr 1e-6 --lr 1e-5 --advantage-estimator ppo --critic-lr 1e-7", "above --critic-lr"),
    ("--save-hf out/{step} --save-interval 1", "{rollout_id}"),
    ("--save-hf out/{} --save-interval 1", "{rollout_id}"),
    ("--lr-decay-samples 10", "use --lr-decay-iters"),
    ("--over-sampling-batch-size 8", "below --rollout-batch-size 32"),
    ("--rollout-temperature 0", "above 0"),
    ("--rollout-top-p 1.5", "at most 1"),
    ("--num-rollout -3", "at least 0"),
    ("--rollout-max-response-len 0", "at least 1"),
    ("--rm-type deepscalar", "of deepscaler"),
    ("--rm-type remote_rm", "needs --rm-url"),
    ("--rm-url localhost:5000", "begins with http://"),
    ("--agent-tool-parser qwen26 --agent-command program", "auto, hermes"),
    ("--agent-reasoning-parser qwen4 --agent-command program", "auto, none"),
    ("--sglang-router-ip 127.0.0.1", "needs --sglang-router-port"),
    ("--update-weight-transport disk", "--update-weight-disk-dir"),
    ("--debug-train-only", "--load-debug-rollout-data"),
    ("--save-hf-dtype source --save-hf x --lora-rank 4", "pass --lora-export merged"),
    ('--multimodal-keys {"image":"images"}', "text model"),
    ("--load /nowhere", "no such folder"),
    ("--ref-load /nowhere --use-kl-loss --kl-loss-coef 0.1", "KL term"),
    ("--custom-rm-path nowhere.py", "does not exist"),
    ("--custom-generate-function-path no_such_module.fn", "no module"),
    ("--rollout-sample-hook-path json.dumpz", "has no 'dumpz'"),
    ("--tensor-model-parallel-size 2", "--train-backend megatron"),
    ("--context-parallel-size 2", "not a multiple"),
    (
        "--context-parallel-size 2 --actor-num-gpus-per-node 2 --attn-implementation sdpa",
        "--context-parallel-size 2",
    ),
    (
        "--rollout-top-p 0.9 --context-parallel-size 2",
        "embedded and --rollout-top-p 0.9 exclude",
    ),
    ("--context-parallel-kind ulysses", "needs --context-parallel-size"),
    (
        "--context-parallel-kind ulysses --context-parallel-size 3 --actor-num-gpus-per-node 3",
        "heads that context parallel ranks cannot divide",
    ),
    (
        "--context-parallel-kind ulysses --context-parallel-size 2 --actor-num-gpus-per-node 2 "
        "--train-backend megatron",
        "needs --train-backend fsdp",
    ),
    ("--num-layers 35", "num_hidden_layers 36"),
    ("--rollout-num-gpus-per-engine 2 --rollout-num-gpus 2", "one GPU"),
    ("--rollout-num-gpus 0", "no engine"),
    ("--micro-batch-size 5", "multiple of --micro-batch-size"),
    ("--actor-num-gpus-per-node 8", "2 CPU cores"),
    (
        "--loss-type sft_loss --use-kl-loss --kl-loss-coef 0.5",
        "--loss-type sft_loss and --use-kl-loss",
    ),
    ("--update-weight-mode delta", "needs --update-weight-transport disk"),
    ("--rollout-data-transport nixl", "is not supported"),
    ("--megatron-deepgemm-forward-layers 1 2", "DeepGEMM"),
    ("--sglang-model-path x", "--hf-checkpoint"),
    ("--router-port 3", "--sglang-router-port"),
    (
        "--train-backend megatron --actor-num-gpus-per-node 3 --tensor-model-parallel-size 2",
        "not a multiple",
    ),
    ("--use-routing-replay", "routing of engines only"),
    ("--train-backend megatron --fp8-format e4m3", "Transformer Engine"),
    ("--train-backend megatron --moe-aux-loss-coeff 0.01", "load-balancing"),
    ("--use-stateless-adam --train-backend megatron", "--use-stateless-adam exclude"),
    ("--fsdp-shard-size 2 --train-backend megatron", "--train-backend fsdp"),
    (
        "--fsdp-shard-size 4 --actor-num-gpus-per-node 6",
        "6 training ranks: use one of 1, 2, 3, 6",
    ),
    ("--fsdp-shard-size 0", "--fsdp-shard-size 0"),
    ("--fsdp-expert-parallel-size 2 --train-backend megatron", "--train-backend fsdp"),
    ("--fsdp-expert-parallel-size 2 --actor-num-gpus-per-node 2", "without routed experts"),
    (
        "--fsdp-expert-parallel-size 3 --actor-num-gpus-per-node 2",
        "does not divide the 2 ranks",
    ),
    (
        "--optimizer-cpu-offload --no-use-distributed-optimizer --train-backend megatron",
        "distributed optimizer",
    ),
    ("--optimizer-cpu-offload --optimizer-offload-fraction 1.5 --train-backend megatron", "0 to 1"),
    ("--optimizer-offload-fraction 0.5 --train-backend megatron", "--optimizer-cpu-offload"),
]


@pytest.mark.parametrize(("line", "part"), ONE_PROBLEM, ids=[line for line, _ in ONE_PROBLEM])
def test_each_mistake_is_one_clear_line(workplace, line: str, part: str) -> None:
    problems = workplace.problems(line)
    named = line.split()[0]
    assert [problem for problem in problems if part in problem], problems
    assert all("\n" not in problem for problem in problems)
    assert any(named.lstrip("-").split("-")[0] in problem for problem in problems)
    assert len(problems) <= 2, problems


def test_a_good_line_has_no_problems(workplace) -> None:
    assert workplace.problems() == []
    assert (
        workplace.problems("--advantage-estimator ppo --normalize-advantages --eps-clip-high 0.28")
        == []
    )


def test_fine_tuning_needs_no_engines(workplace) -> None:
    sft = (
        "--debug-train-only --loss-type sft_loss --rollout-function-path "
        "slime.rollout.sft_rollout.generate_rollout"
    )
    assert workplace.problems(sft) == []


def test_environment_variables_may_be_numbers(workplace: Workplace) -> None:
    file = workplace.write("o.yaml", "train_env_vars: {NCCL_IB_DISABLE: 1, NCCL_DEBUG: INFO}")
    args = workplace.load(f"--override {file}")
    assert environment_texts(args.train_env_vars) == {
        "NCCL_IB_DISABLE": "1",
        "NCCL_DEBUG": "INFO",
    }, "Ray takes texts only"
    problems = workplace.problems('--train-env-vars {"A":true,"B":null}')
    for name, value in (("A", True), ("B", None)):
        assert f"'{name}' needs a text or a number, not {value}" in problems[0]


def test_several_problems_are_told_at_once(workplace) -> None:
    problems = workplace.problems("--num-rolout 3 --kl-loss-coef 1 --lr x --rm-type dappo")
    assert len(problems) == 4
    for part in ("--num-rolout", "--kl-loss-coef", "--lr", "dappo"):
        assert any(part in problem for problem in problems)


def test_a_missing_checkpoint_is_named() -> None:
    from slime.config.parser import ConfigError, load_args

    with pytest.raises(ConfigError) as caught:
        load_args([])
    (problem,) = caught.value.problems
    assert "--hf-checkpoint" in problem


def test_a_hub_id_is_as_good_as_a_folder(workplace) -> None:
    assert workplace.problems("--hf-checkpoint Qwen/Qwen3-4B") == []
    (problem,) = workplace.problems("--hf-checkpoint /path/to/Qwen3-4B")
    assert "no such folder" in problem


def test_eight_gpus_on_a_laptop_are_one_line_with_what_to_change(workplace) -> None:
    (problem,) = workplace.problems("--actor-num-gpus-per-node 8 --rollout-num-gpus 8")
    assert "--actor-num-gpus-per-node 8" in problem and "2 CPU cores" in problem
    assert "--actor-num-gpus-per-node 1 --rollout-num-gpus 1" in problem
    assert workplace.problems("--actor-num-gpus-per-node 2 --rollout-num-gpus 2") == []


def test_a_gpu_machine_counts_its_gpus(workplace) -> None:
    workplace.use(FOUR_GPUS)
    (problem,) = workplace.problems("--actor-num-gpus-per-node 4 --rollout-num-gpus 4")
    assert "8 GPUs" in problem and "has 4" in problem and "--colocate" in problem
    assert workplace.problems("--actor-num-gpus-per-node 4 --rollout-num-gpus 4 --colocate") == []
    assert workplace.problems("--actor-num-gpus-per-node 2 --rollout-num-gpus 2") == []
    assert (
        len(workplace.problems("--actor-num-nodes 2 --actor-num-gpus-per-node 4 --colocate")) == 1
    )


def test_a_cluster_is_not_judged_by_this_machine(workplace) -> None:
    workplace.use(Machine(gpus=0, cores=2, in_cluster=True))
    assert (
        workplace.problems(
            "--actor-num-nodes 8 --actor-num-gpus-per-node 8 --rollout-num-gpus 64 "
            "--global-batch-size 64"
        )
        == []
    )


def test_asynchronous_runs_do_not_share_gpus(workplace) -> None:
    (problem,) = workplace.problems("--colocate", asynchronous=True)
    assert "train_async.py" in problem
    assert (
        workplace.problems("--async-buffer-size 4 --update-weights-interval 2", asynchronous=True)
        == []
    )
    notices = workplace.load("--async-buffer-size 4").notices
    assert any("train_async.py" in notice for notice in notices)


FULLY_ASYNC = f"--rollout-function-path {FULLY_ASYNC_FUNCTION}"
IDLE = [
    ("--save out", "--save-interval"),
    ("--save-hf out/{rollout_id}", "--save-hf out/{rollout_id}: the run"),
]


@pytest.mark.parametrize(("line", "said"), IDLE)
def test_flags_that_change_nothing_are_named(workplace: Workplace, line: str, said: str) -> None:
    assert any(
        said in one for one in workplace.load(line, asynchronous=FULLY_ASYNC in line).notices
    )


def test_evaluation_data_without_an_interval_are_named(workplace: Workplace) -> None:
    said, data = (
        "the run does not evaluate its evaluation data",
        f"--eval-prompt-data a {workplace.data}",
    )
    assert any(said in one for one in workplace.load(data).notices)
    assert not any(said in one for one in workplace.load(f"{data} --eval-interval 2").notices)


def test_hooks_are_found_in_all_forms(workplace) -> None:
    workplace.write(
        "custom_rm.py", "class CustomRewardModel:\n    def __init__(self, model_path): ...\n"
    )
    workplace.write(
        "custom_generate.py",
        "async def custom_generate(args, samples, evaluation=False): return samples\n",
    )
    line = (
        "--custom-rm-path custom_rm.py --custom-generate-function-path custom_generate.py "
        "--max-turns 5"
    )
    args = workplace.load(line)
    assert args.max_turns == 5
    assert workplace.problems("--custom-rm-path custom_rm.py:CustomRewardModel") == []
    assert (
        workplace.problems(
            "--custom-rm-path operator:contains --rollout-sample-hook-path json.loads"
        )
        == []
    )


def test_a_file_of_hooks_is_that_of_the_working_directory(tmp_path, monkeypatch) -> None:
    """One process may check or start runs of several folders."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "reward.py").write_text(f"def reward(): return {name!r}\n")
        monkeypatch.chdir(tmp_path / name)
        function = load_function("reward.py:reward")
        assert function() == name and load_function("./reward.py:reward") is function


def test_a_hook_whose_file_fails_is_reported(workplace) -> None:
    workplace.write("broken.py", "raise RuntimeError('no license')\n")
    (problem,) = workplace.problems("--custom-rm-path broken.py:reward")
    assert "--custom-rm-path" in problem and "no license" in problem


def test_every_difference_to_the_checkpoint_is_named(workplace) -> None:
    good = (
        "--num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 "
        "--num-query-groups 8 --kv-channels 128 --norm-epsilon 1e-6 --rotary-base 1000000 "
        "--vocab-size 151936 --swiglu --qk-layernorm"
    )
    assert workplace.problems(good) == []
    bad = (
        good.replace("--num-layers 36", "--num-layers 28")
        .replace("2560", "1024")
        .replace("1000000", "10000")
    )
    problems = workplace.problems(f"{bad} --untie-embeddings-and-output-weights")
    assert len(problems) == 4
    for part in (
        "--num-layers 28",
        "--hidden-size 1024",
        "--rotary-base 10000.0",
        "tie_word_embeddings",
    ):
        assert any(part in problem for problem in problems), problems


def test_flags_without_effect_are_named_once(workplace) -> None:
    args = workplace.load(
        "--overlap-grad-reduce --sequence-parallel --sglang-mem-fraction-static 0.4 "
        "--attention-dropout 0.0"
    )
    (megatron,) = [notice for notice in args.notices if "--train-backend fsdp" in notice]
    assert (
        "--overlap-grad-reduce" in megatron
        and "--sequence-parallel" in megatron
        and "dropout" not in megatron
    )
    assert sum("--sglang-mem-fraction-static" in notice for notice in args.notices) == 1


@pytest.mark.parametrize("cut", [{"rollout_top_p": 0.9}, {"rollout_top_k": 20}])
def test_sampling_from_a_part_of_the_vocabulary_that_training_cannot_replay_is_asked_for_by_name(
    cut: dict[str, object],
) -> None:
    for engine, trainer, wrong in (
        ("embedded", "fsdp", 0),
        ("sglang", "fsdp", 1),
        ("embedded", "megatron", 1),
    ):
        args = make_args(rollout_backend=engine, train_backend=trainer, **cut)
        problems = rule_problems(args)
        assert len(problems) == wrong and args.notices == []
        assert all("importance ratios" in p and "--allow-truncated-sampling" in p for p in problems)
        args.allow_truncated_sampling = True
        assert rule_problems(args) == []
        assert len(args.notices) == wrong and all(
            "importance ratios" in notice for notice in args.notices
        )
    for untrained in ({"debug_rollout_only": True}, {"loss_type": "sft_loss"}):
        assert rule_problems(make_args(rollout_backend="sglang", **cut, **untrained)) == []


def test_sampling_from_a_part_of_the_vocabulary_needs_logits_without_a_soft_cap(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"final_logit_softcapping": 30.0}')
    (problem,) = rule_problems(make_args(rollout_top_p=0.9, hf_checkpoint=str(tmp_path)))
    assert "soft-caps its logits" in problem and "--rollout-top-p 0.9" in problem
    assert rule_problems(make_args(hf_checkpoint=str(tmp_path))) == []


@pytest.mark.parametrize(
    ("settings", "asynchronous", "said"),
    [
        ({}, False, True),
        ({}, True, True),
        ({"num_steps_per_rollout": 2}, False, False),
        ({"use_rollout_logprobs": True}, False, False),
        ({"keep_old_actor": True}, False, True),  # the copy is what training starts from
        ({"keep_old_actor": True}, True, False),
    ],
    ids=str,
)
def test_opsm_needs_a_policy_that_has_moved(
    settings: dict[str, object], asynchronous: bool, said: bool
) -> None:
    args = make_args(use_opsm=True, **settings)
    assert rule_problems(args, asynchronous=asynchronous) == []
    assert any("--use-opsm" in notice for notice in args.notices) is said


def test_a_kl_that_trains_nothing_is_said_with_its_cost() -> None:
    for coefficient, said in ((0.0, True), (0.001, False)):
        args = make_args(use_kl_loss=True, kl_loss_coef=coefficient)
        assert rule_problems(args) == []
        assert any("forward pass" in notice for notice in args.notices) is said


@pytest.mark.parametrize(
    ("sglang", "settings", "said"),
    [
        ({"speculative_algorithm": "EAGLE"}, {}, True),
        ({"speculative_algorithm": "NGRAM"}, {}, False),
        ({"speculative_algorithm": "EAGLE"}, {"debug_rollout_only": True}, False),
        ({}, {}, False),
    ],
)
def test_a_draft_that_is_not_trained_is_said(
    sglang: dict[str, object], settings: dict[str, object], said: bool
) -> None:
    args = make_args(rollout_backend="sglang", sglang=sglang, **settings)
    rule_problems(args)
    assert any("draft model is not trained" in notice for notice in args.notices) is said


@pytest.mark.parametrize("name", OUTER_CACHES)
def test_a_cache_that_outlives_a_weight_update_is_refused(tmp_path: Path, name: str) -> None:
    """Its entries are found by tokens, so that a prompt would go on from the KV of old weights."""
    options: dict[str, object] = {name: "file"}
    base = {
        "rollout_backend": "sglang",
        "hf_checkpoint": str(tmp_path),
        "rollout_num_gpus_per_engine": 1,
    }

    def refused_caches(**flags: object) -> list[str]:
        return [one for one in rule_problems(make_args(**base, **flags)) if OUTER_CACHE in one]

    (problem,) = refused_caches(sglang=options)
    assert problem.startswith(f"--sglang-{name.replace('_', '-')}: ") and "old weights" in problem
    assert refused_caches(sglang=options, debug_rollout_only=True) == []
    assert refused_caches(sglang={"enable_hierarchical_cache": True}) == []
    groups = "server_groups: [{num_gpus: 1, overrides: {" + name + ": file}}]"
    plain = "server_groups: [{num_gpus: 1}]"
    for policy, judge, refused in ((groups, plain, True), (plain, groups, False)):
        file = tmp_path / "groups.yaml"
        file.write_text(
            f"sglang:\n- {{name: policy, {policy}}}\n"
            f"- {{name: judge, model_path: /judge, update_weights: false, {judge}}}\n"
        )
        assert bool(refused_caches(sglang_config=str(file))) == refused


def test_such_a_cache_is_refused_on_the_command_line(workplace) -> None:
    problems = workplace.problems("--rollout-backend sglang --sglang-hicache-storage-backend file")
    assert any(problem.startswith("--sglang-hicache-storage-backend: ") for problem in problems), (
        problems
    )


def test_notices_say_what_a_flag_does_not_do(workplace) -> None:
    args = workplace.load(
        "--http-proxy x --kl-coef 0.1 --micro-batch-size 1 --max-tokens-per-gpu 100 "
        "--num-rollout 2 --num-epoch 3"
    )
    text = "\n".join(args.notices)
    for part in (
        "--http-proxy x: ",
        "--kl-coef 0.1: this --advantage-estimator has no KL",
        "--max-tokens-per-gpu 100: needs --use-dynamic-batch-size",
        "takes precedence over --num-epoch",
    ):
        assert part in text


FULLY_ASYNC = (
    "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async"
)


def test_the_fully_asynchronous_rollout_is_for_the_asynchronous_loop(workplace) -> None:
    (problem,) = workplace.problems(FULLY_ASYNC)
    assert "train_async.py" in problem
    args = workplace.load(f"{FULLY_ASYNC} --mask-offpolicy-in-partial-rollout", asynchronous=True)
    assert args.rm_type == "math", "its rewards are those of the default rollout"
    assert args.eval_function_path == "slime.rollout.sglang_rollout.generate_rollout", (
        "the pool does not evaluate"
    )
    own = "slime.rollout.sleep_rollout.sleep"
    assert (
        workplace.load(
            f"{FULLY_ASYNC} --eval-function-path {own}", asynchronous=True
        ).eval_function_path
        == own
    )


def test_a_staleness_bound_that_cannot_hold_is_refused(workplace) -> None:
    (problem,) = workplace.problems(
        "--max-weight-staleness 1 --update-weights-interval 3", asynchronous=True
    )
    assert "--update-weights-interval 3" in problem
    assert (
        workplace.problems(
            "--max-weight-staleness 2 --update-weights-interval 3", asynchronous=True
        )
        == []
    )
    (problem,) = workplace.problems("--max-weight-staleness 1 --partial-rollout", asynchronous=True)
    assert "fully asynchronous" in problem
    (problem,) = workplace.problems(
        "--max-weight-staleness 1 --over-sampling-batch-size 64", asynchronous=True
    )
    assert "fully asynchronous" in problem
    assert (
        workplace.problems(
            f"{FULLY_ASYNC} --max-weight-staleness 1 --partial-rollout", asynchronous=True
        )
        == []
    )
    assert workplace.problems("--max-weight-staleness -1", asynchronous=True)
    assert any(
        "is for train_async.py" in notice
        for notice in workplace.load("--max-weight-staleness 1").notices
    )


def test_stale_samples_are_corrected_unless_the_user_chose_otherwise(workplace) -> None:
    args = workplace.load("--async-buffer-size 2", asynchronous=True)
    (notice,) = [notice for notice in args.notices if "--use-tis is on" in notice]
    assert args.use_tis is True and "steps older" in notice and "--no-use-tis" in notice
    assert workplace.load("--async-buffer-size 2").use_tis is False, "train.py has no stale samples"
    for line in (
        "--over-sampling-batch-size 64",
        "--over-sampling-batch-size 64 --partial-rollout",
    ):
        late = workplace.load(line)
        (notice,) = [notice for notice in late.notices if "--use-tis is on" in notice]
        assert late.use_tis is True and "later one" in notice and "--no-use-tis" in notice
        for chosen in ("--no-use-tis", "--use-rollout-logprobs", "--loss-type sft_loss"):
            assert workplace.load(f"{line} {chosen}").use_tis is False, chosen
    masked = "--over-sampling-batch-size 64 --partial-rollout --mask-offpolicy-in-partial-rollout"
    assert workplace.load(masked).use_tis is False, "tokens of earlier rollouts are not trained"
    for line in (
        "--no-use-tis",
        "--use-rollout-logprobs",
        "--max-weight-staleness 0",
        "--loss-type sft_loss",
    ):
        assert workplace.load(line, asynchronous=True).use_tis is False, line
    measured = (
        "--get-mismatch-metrics --custom-tis-function-path slime.algorithms.mis.compute_mis_weights"
    )
    assert workplace.load(measured, asynchronous=True).use_tis is False
    assert workplace.load(f"{measured} --use-tis", asynchronous=True).use_tis is True


def test_rollout_workers_generate_for_the_rollout_functions_of_slime() -> None:
    asynchronous = FULLY_ASYNC_FUNCTION.replace(".generate", ":generate")
    for path, workers in ((DEFAULT_ROLLOUT_FUNCTION, True), (asynchronous, True), ("a.b", False)):
        args = make_args(rollout_workers=3, rollout_function_path=path)
        assert may_use_workers(args.rollout_function_path, args.eval_function_path) == workers
        told = [words for words, _ in idle_flags(Run(args, True, LAPTOP))]
        assert told == [] if workers else told == ["--rollout-workers 3"]
    assert may_use_workers("a.b", DEFAULT_ROLLOUT_FUNCTION)


def test_a_schedule_is_replayed_in_one_process(tmp_path: Path) -> None:
    replay = {
        "replay_schedule": str(tmp_path),
        "rollout_backend": "embedded",
        "deterministic": True,
    }
    (problem,) = rule_problems(
        make_args(asynchronous=True, rollout_workers=2, **replay), asynchronous=True
    )
    assert "--replay-schedule" in problem and "--rollout-workers 2" in problem
    assert rule_problems(make_args(asynchronous=True, **replay), asynchronous=True) == []


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--end-weight-decay 0.2", "a weight decay that changes need --weight-decay-incr-style"),
        ("--weight-decay-incr-style linear", "needs --start-weight-decay or --end-weight-decay"),
        ("--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.2", None),
        ("--start-weight-decay 0.1 --end-weight-decay 0.1", None),
        ("", None),
    ],
)
def test_a_weight_decay_that_changes(flags: str, problem: str | None, workplace: Workplace) -> None:
    line = f"--train-backend megatron --weight-decay 0.1 {flags}"
    found = [text for text in workplace.problems(line) if "weight-decay" in text]
    assert problem in found[0] if problem else not found
