"""Evaluation over HTTP, and the metrics as pure functions of samples, with numbers worked by
hand.
"""

import asyncio
import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_args import make_args
from rollout_parts import SmallEngine, arguments

from slime.data.sample import PrefixCacheInfo, Sample, SpecInfo
from slime.observability.metric_utils import has_repetition
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.metrics import Counts, eval_metrics, pass_at_k, pass_rates, rollout_metrics
from slime.rollout.sglang_rollout import eval_rollout
from slime.rollout.state import GenerateState

NO_FLAGS = make_args().with_values()


@pytest.fixture
def data(tmp_path):
    """Two data sets."""
    for name, count in (("easy", 3), ("hard", 2)):
        lines = [json.dumps({"prompt": f"{name} {i}", "label": str(i)}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


async def evaluate(args, rollout_id=3):
    return await asyncio.wait_for(eval_rollout(args, rollout_id), 30)


async def test_all_data_sets_in_file_order_whatever_arrives_first(tokenizer_dir, data):
    seen = []
    for jitter in (0.0, 0.03):
        args = arguments(
            tokenizer_dir, eval_prompt_data=["easy", str(data / "easy.jsonl"), "hard", str(data / "hard.jsonl")],
            n_samples_per_eval_prompt=4, eval_temperature=0.5, eval_max_response_len=3,
        )  # fmt: skip
        async with SmallEngine(jitter=jitter) as engine:
            output = await evaluate(engine.serve(args))
        assert list(output.data) == ["easy", "hard"]
        assert [s.prompt for s in output.data["easy"]["samples"]] == [
            f"easy {i}" for i in range(3) for _ in range(4)
        ]
        assert len(output.data["hard"]["rewards"]) == 8
        flags = output.data["easy"]["truncated"]
        assert flags == [s.truncated for s in output.data["easy"]["samples"]] and any(flags)
        assert {r["sampling_params"]["temperature"] for r in engine.requests} == {0.5}
        assert {r["sampling_params"]["max_new_tokens"] for r in engine.requests} == {3}
        assert len({r["sampling_params"]["sampling_seed"] for r in engine.requests}) == 20
        seen.append(
            [
                (s.prompt, s.response, s.reward)
                for part in output.data.values()
                for s in part["samples"]
            ]
        )
    assert seen[0] == seen[1]


async def test_an_evaluation_stops_at_media_too(tokenizer_dir, data):
    """A placeholder that the model writes in a turn must not be in the request of the next one."""
    args = arguments(
        tokenizer_dir, eval_prompt_data=["easy", str(data / "easy.jsonl")], eval_max_response_len=3
    )
    GenerateState(args).media_token_ids = frozenset({9})
    async with SmallEngine() as engine:
        await evaluate(engine.serve(args))
    assert [r["sampling_params"]["stop_token_ids"] for r in engine.requests] == [[9]] * 3


async def test_settings_of_a_data_set_override_those_of_the_run(tokenizer_dir, data, tmp_path):
    (tmp_path / "fns.py").write_text(
        "async def gen(args, sample, sampling_params, evaluation=False):\n"
        "    sample.response = f'own {evaluation}'\n"
        "    return sample\n"
        "async def rm(args, sample, **kw): return {'score': 0.25, 'other': 1}\n"
    )
    config = {
        "eval": {
            "defaults": {"temperature": 0.1, "n_samples_per_eval_prompt": 2},
            "datasets": [
                {"name": "easy", "path": str(data / "easy.jsonl"), "rm_type": "last_number", "top_k": 5, "stop": ["x"]},
                {
                    "name": "hard",
                    "path": str(data / "hard.jsonl"),
                    "n_samples_per_eval_prompt": 1,
                    "custom_generate_function_path": f"{tmp_path / 'fns.py'}:gen",
                    "custom_rm_path": f"{tmp_path / 'fns.py'}:rm",
                    "metadata_overrides": {"level": 9},
                },
            ],
        }
    }  # fmt: skip
    (data / "eval.yaml").write_text(json.dumps(config))
    args = arguments(tokenizer_dir, eval_config=str(data / "eval.yaml"), eval_reward_key="score")
    async with SmallEngine() as engine:
        output = await evaluate(engine.serve(args))
    assert len(engine.requests) == 6
    params = engine.requests[0]["sampling_params"]
    assert (params["temperature"], params["top_k"], params["stop"]) == (0.1, 5, ["x"])
    hard = output.data["hard"]
    assert [s.response for s in hard["samples"]] == ["own True"] * 2 and hard["rewards"] == [
        0.25,
        0.25,
    ]
    assert hard["samples"][0].metadata["level"] == 9
    assert set(output.data["easy"]["rewards"]) <= {0.0, 1.0}


async def test_siblings_of_a_fan_out_count_as_one_sample(tokenizer_dir, data, tmp_path):
    (tmp_path / "fan.py").write_text(
        "import copy\n"
        "async def gen(args, sample, sampling_params, evaluation=False):\n"
        "    sample.response, sample.rollout_id = 'a', sample.index\n"
        "    return [sample, copy.deepcopy(sample)] if sample.index % 2 else sample\n"
        "async def rm(args, sample, **kw):\n"
        "    return [1.0] * len(sample) if isinstance(sample, list) else float(sample.index % 2)\n"
    )
    args = arguments(
        tokenizer_dir, eval_prompt_data=["easy", str(data / "easy.jsonl")], n_samples_per_eval_prompt=2,
        custom_generate_function_path=f"{tmp_path / 'fan.py'}:gen", custom_rm_path=f"{tmp_path / 'fan.py'}:rm",
    )  # fmt: skip
    async with SmallEngine() as engine:
        output = await evaluate(engine.serve(args))
    assert (
        output.data["easy"]["rewards"] == [0.0, 1.0] * 3
        and len(output.data["easy"]["samples"]) == 9
    )
    metrics = eval_metrics(output.data)
    assert metrics["eval/easy-pass@1"] == 0.5 and metrics["eval/easy-pass@2"] == 1.0


@pytest.mark.parametrize("where", ["dataset", "defaults"])
async def test_a_data_sets_reward_type_wins_over_the_runs_function(
    tokenizer_dir, data, tmp_path, where
):
    (tmp_path / "rm.py").write_text("async def rm(args, sample, **kw): return 7.0\n")
    sets = [{"name": name, "path": str(data / f"{name}.jsonl")} for name in ("easy", "hard")]
    own = {"rm_type": "random"}
    if where == "dataset":
        sets[0] |= own
    (data / "eval.yaml").write_text(
        json.dumps({"eval": {"defaults": own if where == "defaults" else {}, "datasets": sets}})
    )
    args = arguments(tokenizer_dir, rm_type=None, custom_rm_path=str(tmp_path / "rm.py"))
    args.eval_config = str(data / "eval.yaml")
    async with SmallEngine() as engine:
        output = await evaluate(engine.serve(args))
    assert set(output.data["easy"]["rewards"]) <= {0.0, 1.0}
    assert (output.data["hard"]["rewards"] == [7.0, 7.0]) == (where == "dataset")


@pytest.mark.parametrize(
    ("parameter", "rewards"), [("samples", [2.0, 2.0]), ("sample", [5.0, 5.0])]
)
async def test_a_data_sets_own_function_under_group_rm(
    tokenizer_dir, data, tmp_path, parameter, rewards
):
    (tmp_path / "rm.py").write_text(
        "async def group(args, samples, **kw): return [0.0] * len(samples)\n"
        f"async def own(args, {parameter}, **kw):\n"
        f"    return [float(len({parameter}))] * len({parameter}) if isinstance({parameter}, "
        "list) else 5.0\n"
    )
    entry = {
        "name": "easy",
        "path": str(data / "easy.jsonl"),
        "custom_rm_path": f"{tmp_path / 'rm.py'}:own",
    }
    (data / "eval.yaml").write_text(json.dumps({"eval": {"datasets": [entry]}}))
    args = arguments(tokenizer_dir, group_rm=True, custom_rm_path=f"{tmp_path / 'rm.py'}:group")
    args.eval_config, args.n_samples_per_eval_prompt = str(data / "eval.yaml"), 2
    async with SmallEngine() as engine:
        output = await evaluate(engine.serve(args))
    assert output.data["easy"]["rewards"] == rewards * 3


async def test_group_rewards_work_in_evaluation(tokenizer_dir, data, tmp_path):
    (tmp_path / "rm.py").write_text(
        "async def rm(args, samples, **kw):\n"
        "    return [len(samples) + i / 10 for i in range(len(samples))]\n"
    )
    args = arguments(
        tokenizer_dir, eval_prompt_data=["easy", str(data / "easy.jsonl")], n_samples_per_eval_prompt=2, group_rm=True,
        custom_rm_path=str(tmp_path / "rm.py"),
    )  # fmt: skip
    async with SmallEngine() as engine:
        output = await evaluate(engine.serve(args))
    assert output.data["easy"]["rewards"] == [2.0, 2.1] * 3


async def test_dict_rewards_without_a_key_and_deadlines_are_errors(tokenizer_dir, data, tmp_path):
    (tmp_path / "rm.py").write_text(
        "async def rm(args, sample, **kw): return {'score': 1, 'why': 'x'}\n"
    )
    args = arguments(
        tokenizer_dir,
        eval_prompt_data=["easy", str(data / "easy.jsonl")],
        custom_rm_path=str(tmp_path / "rm.py"),
    )
    async with SmallEngine() as engine:
        with pytest.raises(ValueError, match="--eval-reward-key"):
            await evaluate(engine.serve(args))
    args = arguments(
        tokenizer_dir, eval_prompt_data=["easy", str(data / "easy.jsonl")], phase_timeout=3.0
    )
    async with SmallEngine(slow=lambda prompt: prompt == "easy 1") as engine:
        with pytest.raises(TimeoutError, match="1 of 3 prompts"):
            await evaluate(engine.serve(args))


async def test_an_evaluation_has_the_share_of_exceptions_too(tokenizer_dir, data, tmp_path):
    (tmp_path / "rm.py").write_text(
        "async def rm(args, sample, **kw):\n"
        "    if sample.group_index == 1: raise OSError('no judge')\n"
        "    return {'right': 1.0, 'short': 0.5}\n"
    )
    args = arguments(
        tokenizer_dir,
        eval_prompt_data=["easy", str(data / "easy.jsonl")],
        custom_rm_path=str(tmp_path / "rm.py"),
        reward_max_error_share=0.4,
    )
    async with SmallEngine() as engine:
        output = await evaluate(engine.serve(args))
        rewards = output.data["easy"]["rewards"]
        assert [rewards[0], rewards[2]] == [1.5, 1.5] and math.isnan(rewards[1])
        assert eval_metrics(output.data)["eval/easy/reward/short"] == 0.5
        args.reward_max_error_share = 0.3
        with pytest.raises(RuntimeError, match=r"evaluation easy.*1 of 3.*no judge"):
            await evaluate(args)


async def test_a_verifier_without_an_answer_is_not_a_wrong_answer(tokenizer_dir, data, tmp_path):
    (tmp_path / "rm.py").write_text(
        "from slime.rollout.rm_hub.outcome import mark_unscored\n"
        "async def rm(args, sample, **kw):\n"
        "    return mark_unscored(sample, 'timeout', 'x') if sample.group_index == 1 else 1.0\n"
    )
    args = arguments(
        tokenizer_dir,
        eval_prompt_data=["easy", str(data / "easy.jsonl")],
        custom_rm_path=str(tmp_path / "rm.py"),
    )
    async with SmallEngine() as engine:
        output = await evaluate(engine.serve(args))
    assert math.isnan(output.data["easy"]["rewards"][1])
    metrics = eval_metrics(output.data)
    assert metrics["eval/easy"] == 1.0 and metrics["eval/easy-reward_missing_count"] == 1


# --- metrics ---------------------------------------------------------------------------------


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_pass(n, draws):
    correct = draws.draw(st.integers(0, n))
    k = draws.draw(st.integers(1, n))
    marks = [True] * correct + [False] * (n - correct)
    every = list(itertools.combinations(marks, k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, every)) / len(every))


def test_pass_rates_by_hand():
    rewards = [("a", 1.0), ("a", 0.0), ("a", 0.0), ("a", 0.0), ("b", -1.0), ("b", 1.0), ("c", 0.7)]
    # pass@1: (1/4 + 1/2 + 1) / 3; pass@2: a: 1 - C(3,2)/C(4,2) = 1/2, b: 1; pass@4: a: 1
    assert pass_rates(rewards) == {1: pytest.approx(7 / 12), 2: pytest.approx(0.75), 4: 1.0}
    assert pass_rates([]) == {}


def sample(group, reward, length=2, **more):
    return Sample(
        group_index=group, reward=reward, response_length=length, response="x" * length, **more
    )


def test_mean_and_pass_of_six_samples_with_one_missing():
    """pass@k goes up to the data set's own n, here 6; a missing reward counts nowhere."""
    part = {"rewards": [1, 0, 0, 0, 0, 0, 1, 1, 0.4, 0.6, 0, math.nan], "n_samples_per_prompt": 6}
    metrics = eval_metrics({"ds": part})
    # passes: 1 of 6 and 3 of 5 (0.4 is none); pass@4: 1 - C(5,4)/C(6,4) = 2/3 and 1; pass@6: the
    # first prompt's alone
    assert metrics["eval/ds-pass@1"] == pytest.approx((1 / 6 + 3 / 5) / 2)
    assert metrics["eval/ds-pass@4"] == pytest.approx((2 / 3 + 1) / 2)
    assert metrics["eval/ds-pass@6"] == 1.0 and "eval/ds-pass@8" not in metrics
    assert metrics["eval/ds-mean@6"] == pytest.approx((1 / 6 + 3 / 5) / 2)
    assert (
        metrics["eval/ds"] == pytest.approx(4 / 11) and metrics["eval/ds-reward_missing_count"] == 1
    )


def test_rollout_metrics_by_hand():
    samples = [
        sample(0, 1.0, 2),
        sample(0, 1.0, 4, loss_mask=[1, 0, 0, 1]),
        sample(1, 0.0, 6, status=Sample.Status.TRUNCATED),
        sample(1, 1.0, 8),
        sample(2, None, 10, reward_timed_out=True),
    ]
    metrics = rollout_metrics(NO_FLAGS, NO_FLAGS.reward_key, samples)
    assert metrics["rollout/response_len/mean"] == (2 + 2 + 6 + 8 + 10) / 5
    assert (metrics["rollout/response_len/median"], metrics["rollout/response_len/max"]) == (6, 10)
    assert metrics["rollout/truncated_ratio"] == 0.2
    assert metrics["rollout/raw_reward"] == 0.75
    assert (
        metrics["rollout/zero_std/count_1.0"] == 1 and "rollout/zero_std/count_0.0" not in metrics
    )
    assert metrics["rollout/repetition_frac"] == 0
    assert not any(name.startswith(("passrate", "multi_turn", "perf")) for name in metrics)


def test_rewards_of_a_fan_out_count_once_in_training_as_in_evaluation():
    args = make_args().with_values(log_passrate=True)
    leaves = [sample(0, 1.0, 2, rollout_id=5) for _ in range(3)]
    samples = [*leaves, sample(0, 0.0, 2), sample(1, 0.0, 2), sample(2, 0.1, 2, rollout_id=9)]
    samples += [sample(2, 0.1, 2, rollout_id=9) for _ in range(2)]
    metrics = rollout_metrics(args, args.reward_key, samples)
    assert metrics["rollout/raw_reward"] == (1.0 + 0.0 + 0.0 + 0.1) / 4
    assert metrics["rollout/zero_std/count_0.0"] == metrics["rollout/zero_std/count_0.1"] == 1
    assert metrics["passrate/pass@1"] == 0.5 / 3 and metrics["passrate/pass@2"] == 1.0
    assert "passrate/pass@4" not in metrics
    assert metrics["rollout/response_len/mean"] == 2
    counts = Counts()
    counts.add(samples[:4], None)
    assert counts.numbers() == {"tokens": 8, "reward": 0.5}


def test_the_speed_of_a_run_without_gpus_of_its_own_for_generation():
    """``--rollout-num-gpus 0``: with external engines, or for SFT without engines."""
    args = make_args().with_values(rollout_num_gpus=0)
    sample = Sample(tokens=[1, 2, 3], response_length=2, reward=1.0, group_index=0)
    found = rollout_metrics(args, args.reward_key, [sample], 4.0, args.rollout_num_gpus)
    assert (
        found["perf/longest_sample_tokens_per_sec"] == 0.5
        and "perf/tokens_per_gpu_per_sec" not in found
    )


def test_metrics_that_are_asked_for():
    args = make_args().with_values(
        log_multi_turn=True,
        log_passrate=True,
        log_reward_category="kind",
        reward_key="score",
        rollout_num_gpus=2,
    )
    samples = [
        sample(
            0,
            {"score": 1.0, "kind": "good"},
            4,
            loss_mask=[1, 1, 0, 0],
            metadata={"round_number": 3},
        ),
        sample(
            0,
            {"score": -1.0, "kind": "bad"},
            2,
            metadata={"round_number": 1},
            non_generation_time=1.0,
        ),
    ]
    samples[0].prefix_cache_info = PrefixCacheInfo(cached_tokens=30, total_prompt_tokens=40)
    samples[0].spec_info = SpecInfo(6, 8, 4, 10)
    metrics = rollout_metrics(args, args.reward_key, samples, 2.0, args.rollout_num_gpus)
    assert (
        metrics["rollout/prefix_cache_hit_rate"] == 0.75
        and metrics["rollout/avg_cached_tokens_per_sample"] == 15
    )
    assert (
        metrics["rollout/spec_accept_rate"] == 0.75 and metrics["rollout/spec_accept_length"] == 2.5
    )
    assert metrics["rollout/error_cat/bad"] == 0.5
    assert metrics["multi_turn/raw_response_length/mean"] == 3
    assert metrics["multi_turn/wo_obs_response_length/max"] == 2
    assert metrics["multi_turn/multi_turn_metric/round_number_max"] == 3
    assert metrics["passrate/pass@1"] == 0.5 and metrics["passrate/pass@2"] == 1.0
    assert (
        metrics["perf/tokens_per_gpu_per_sec"] == 1.5
        and metrics["perf/longest_sample_tokens_per_sec"] == 2.0
    )
    assert metrics["perf/effective_tokens_per_gpu_per_sec"] == 1.0
    assert metrics["perf/longest_sample_tokens_per_sec_without_non_generation"] == 2.0
    assert metrics["perf/non_generation_time/max"] == 1.0


def test_repetition():
    assert has_repetition("again and again " * 1000)
    assert not has_repetition("")
    assert not has_repetition("A short answer that says a thing once.")


def test_eval_metrics_use_each_data_sets_own_number_of_samples():
    part = {
        "rewards": [1.0, 0.0, 0.0, 0.0],
        "truncated": [True, False, False, False],
        "n_samples_per_prompt": 2,
    }
    metrics = eval_metrics({"ds": part})
    assert metrics == {
        "eval/ds": 0.25, "eval/ds-truncated_ratio": 0.25, "eval/ds-mean@2": 0.25, "eval/ds-pass@1": 0.25,
        "eval/ds-pass@2": 0.5,
    }  # fmt: skip
    users_own = {"rewards": [1.0, 0.0]}
    assert eval_metrics({"ds": users_own}) == {"eval/ds": 0.5}


def test_older_return_forms_are_wrapped_and_others_refused():
    groups = [[Sample()]]
    assert call_rollout_fn(lambda a, r, d, evaluation: groups, None, 0, None).samples is groups
    wrapped = call_rollout_fn(lambda a, r, d, evaluation: {"x": {}}, None, 0, None, evaluation=True)
    assert isinstance(wrapped, RolloutFnEvalOutput) and wrapped.data == {"x": {}}
    output = RolloutFnTrainOutput(groups, {"m": 1})
    assert call_rollout_fn(lambda a, r, d, evaluation: output, None, 0, None) is output
    with pytest.raises(TypeError, match=r"dict.*RolloutFnTrainOutput"):
        call_rollout_fn(lambda a, r, d, evaluation: {}, None, 0, None)


def test_an_evaluation_whose_verifier_gave_no_result_has_no_pass_rate():
    metrics = eval_metrics(
        {"ds": {"rewards": [math.nan] * 2, "n_samples_per_prompt": 2}}, passrate=True
    )
    assert metrics == {"eval/ds-reward_missing_count": 2.0}
