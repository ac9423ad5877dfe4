"""Words to Args: every flag, every spelling, and all mistakes told together."""

from __future__ import annotations

import argparse
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from config_parts import Workplace
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import of_all

from slime.config.args import FLAGS, Args
from slime.config.flag import Flag, convert, out_of_range, range_text
from slime.config.parser import (
    ConfigError,
    build_parser,
    check_args,
    load_args,
    parse_args,
    read_command_line,
    read_settings,
)
from slime.plugins.compat.older import (
    FORKS,
    GONE,
    OTHER_FRAMEWORKS,
    UNREAD_VARIABLES,
    unread_variables,
)

CHECKOUT = Path(__file__).resolve().parents[2]

BLOCKED = (
    "torch",
    "transformers",
    "sglang",
    "megatron",
    "ray",
    "aiohttp",
    "pyarrow",
    "numpy",
    "tensorboard",
)


def words(flag: Flag, value: object) -> list[str]:
    """How a user would type ``value``."""
    if flag.kind == "toggle":
        return [flag.option if value else f"--no-{flag.option[2:]}"]
    if flag.is_bool:
        return [flag.option]
    if flag.kind == "repeat":
        return [word for item in value for word in (flag.option, str(item))]  # type: ignore[attr-defined]
    if flag.takes_list:
        return [flag.option, *map(str, value)]  # type: ignore[call-overload]
    return [flag.option, json.dumps(value) if flag.kind == "json" else str(value)]


def values_of(flag: Flag) -> st.SearchStrategy[object]:
    """Values that a command line can carry for this flag."""
    text = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8)
    if flag.choices:
        one: st.SearchStrategy[object] = st.sampled_from(flag.choices)
    elif flag.value_type is int:
        low = -(2**40) if flag.low is None else int(flag.low)
        one = st.integers(low, 2**40 if flag.high is None else int(flag.high))
    elif flag.value_type is float:
        low_or_above = flag.low if flag.low is not None else flag.above
        one = st.floats(
            low_or_above, flag.high, exclude_min=flag.above is not None, allow_nan=False
        )
        one = one.filter(math.isfinite)
    elif flag.value_type is dict:
        return st.dictionaries(text, st.one_of(text, st.integers(), st.booleans()), max_size=3)
    else:
        one = text
    if flag.kind == "switch":
        return st.just(True)
    if flag.kind == "negative":
        return st.just(False)
    if flag.kind == "toggle":
        return st.booleans()
    return st.lists(one, min_size=1, max_size=4) if flag.takes_list else one


ANY_TEXT = sorted(name for name, flag in FLAGS.items() if flag.valid is None and not flag.entries)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(ANY_TEXT).flatmap(lambda name: st.tuples(st.just(name), values_of(FLAGS[name])))
)
def test_what_is_typed_is_what_args_hold(case: tuple[str, object]) -> None:
    name, value = case
    args, problems = read_command_line(words(FLAGS[name], value))
    assert problems == []
    assert getattr(args, name) == value
    assert type(getattr(args, name)) is type(value)
    assert args.explicit == {name}


names = st.lists(st.sampled_from(ANY_TEXT), unique=True, min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(
    names.flatmap(
        lambda chosen: st.tuples(*(st.tuples(st.just(n), values_of(FLAGS[n])) for n in chosen))
    ),
    st.data(),
)
def test_any_command_line_in_any_order_and_either_form(
    line: tuple[tuple[str, object], ...], data: st.DataObject
) -> None:
    typed: list[list[str]] = []
    for name, value in line:
        group = words(FLAGS[name], value)
        if (
            len(group) == 2
            and FLAGS[name].kind not in ("list", "pairs")
            and data.draw(st.booleans())
        ):
            group = ["=".join(group)]
        typed.append(group)
    order = data.draw(st.permutations(typed))
    args, problems = read_command_line([word for group in order for word in group])
    assert problems == []
    assert {name: getattr(args, name) for name, _ in line} == dict(line)
    untouched = Args()
    assert all(
        getattr(args, name) == getattr(untouched, name) for name in FLAGS if name not in dict(line)
    )


def near_misses(option: str) -> list[str]:
    """How people get a flag wrong: underscores, a letter twice, two exchanged, one left out."""
    letters = [
        i for i in range(4, len(option) - 1) if option[i].isalpha() and option[i + 1].isalpha()
    ]
    i = letters[len(letters) // 2]
    return [
        "--" + option[2:].replace("-", "_"),
        option[:i] + option[i] + option[i:],
        option[:i] + option[i + 1] + option[i] + option[i + 2 :],
        option[:i] + option[i + 1 :],
    ]


@pytest.mark.more
def test_near_misses_are_told_the_flag_that_was_meant() -> None:
    """Whichever way the name was hit wrong; where two flags are as near, one of them."""
    tried = [
        (miss, flag.option)
        # looking for what is near takes some milliseconds each
        for flag in list(FLAGS.values())[:: of_all(8, 24)]
        if len(flag.option) > 10
        for miss in near_misses(flag.option)
        if miss not in {other.option for other in FLAGS.values()}
    ]
    found = read_command_line([miss for miss, _ in tried])[1]
    said = {
        problem.partition(":")[0]: problem.rpartition("did you mean ")[2].rstrip("?")
        for problem in found
    }
    wrong = [(miss, meant, said.get(miss)) for miss, meant in tried if said.get(miss) != meant]
    assert len(tried) > 40 and len(wrong) < 0.02 * len(tried), wrong
    assert all(answer in {flag.option for flag in FLAGS.values()} for _, _, answer in wrong)


WRONG_VALUES: dict[type, list[str]] = {
    int: ["x", "1.5", "inf"],
    float: ["x", "1,5"],
    dict: ["{", "[1]", "3"],
}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(sorted(FLAGS)), unique=True, min_size=2, max_size=12), st.data())
def test_all_type_errors_are_told_together(chosen: list[str], data: st.DataObject) -> None:
    line, expected = [], set()
    for name in chosen:
        flag = FLAGS[name]
        wrong = ["not one of them"] if flag.choices else WRONG_VALUES.get(flag.value_type, [])
        if flag.is_bool or not wrong:
            continue
        line += [flag.option, data.draw(st.sampled_from(wrong))]
        expected.add(flag.option)
    problems = read_command_line([*line, "--no-such-flag-at-all"])[1]
    assert {problem.partition(":")[0] for problem in problems} == {
        *expected,
        "--no-such-flag-at-all",
    }
    assert len(problems) == len(expected) + 1


def test_variables_that_nothing_reads_are_pointed_out() -> None:
    from tools.flags_page import _VARIABLES

    said = unread_variables(
        {"SLIME_HOST_IP": "1", "SLIME_DEEPGEMM_MOE_X": "1", "SLIME_TEST_MODEL": "m", "HOME": "/"}
    )
    assert [line.partition(" has no effect: ")[0] for line in said] == [
        "environment variable SLIME_DEEPGEMM_MOE_X",
        "environment variable SLIME_HOST_IP",
    ]
    code = "".join(
        path.read_text()
        for path in (CHECKOUT / "slime").rglob("*.py")
        if path.name != "reference.py"
    )
    unread = [
        name for name in _VARIABLES if f'"{name}"' not in code and not name.startswith("WANDB_")
    ]
    assert unread == [] and not any(f'environ.get("{name}"' in code for name in UNREAD_VARIABLES)


def test_every_default_survives_being_typed() -> None:
    line = [word for flag in FLAGS.values() if flag.default not in (None, [], {}) and not flag.is_bool
            for word in words(flag, flag.default)]  # fmt: skip
    args, problems = read_command_line(line)
    assert problems == []
    assert {name: getattr(args, name) for name in FLAGS} == {
        name: getattr(Args(), name) for name in FLAGS
    }


def test_every_flag_says_what_it_is() -> None:
    for flag in FLAGS.values():
        assert flag.help and not flag.help.endswith("."), flag.name
        assert flag.reason or flag.status not in ("notice", "refused"), flag.name
    assert not set(GONE) & {flag.option for flag in FLAGS.values()}


def test_unknown_flags_are_reported_together_with_suggestions() -> None:
    _, problems = read_command_line(
        [
            "--rollout_batch_size",
            "4",
            "--num-rolout",
            "3",
            "--sglang-mem-fraction-statc",
            "0.5",
            "--zzzz",
            "--use-critic",
        ]
    )
    assert problems == [
        "--rollout_batch_size: no such flag; did you mean --rollout-batch-size?",
        "--num-rolout: no such flag; did you mean --num-rollout?",
        "--sglang-mem-fraction-statc: no such flag; did you mean --sglang-mem-fraction-static?",
        "--zzzz: no such flag",
        "--use-critic was removed: use --advantage-estimator ppo, which creates a critic",
    ]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--use-peft", "--use-peft does not exist: use --lora-rank R"),
        ("--peft_type=lora", "--peft_type does not exist: use --lora-rank R"),
        ("--qlora", "--qlora does not exist: use --lora-rank R --lora-base-quantization nf4"),
        ("--use-vllm", "--use-vllm does not exist: use --rollout-backend vllm"),
        ("--deepspeed-config", "--deepspeed-config does not exist: DeepSpeed is not supported"),
        ("--learning-rate=1", "--learning-rate is a flag of trl; in slime: --lr"),
        ("--max_steps=9", "--max_steps is a flag of trl; in slime: --num-rollout"),
        (
            "--gradient_accumulation_steps=4",
            "--gradient_accumulation_steps is a flag of trl; in slime: counted in --global-",
        ),
        (
            "--generate_max_turns",
            "--generate_max_turns is a flag of miles, a fork of slime: use --max-turns",
        ),
        (
            "--vllm-router-ip=a",
            "--vllm-router-ip is a flag of vime, a fork of slime: engines of vLLM",
        ),
    ],
)
def test_what_other_frameworks_have_is_refused_with_the_reason(typed: str, said: str) -> None:
    (problem,) = read_command_line([typed])[1]
    assert problem.startswith(said) and "did you mean" not in problem


def test_no_flag_that_exists_looks_like_another_frameworks() -> None:
    options = build_parser()._option_string_actions
    assert [option for option in options if option.startswith((*OTHER_FRAMEWORKS, *FORKS))] == []


def test_no_abbreviations_and_no_stray_words() -> None:
    assert "mean --num-rollout?" in "".join(read_command_line(["--num-roll", "3"])[1])
    assert "has true" in "".join(read_command_line(["--colocate", "true"])[1])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--lr fast", "--lr: 'fast' is not a number"),
        ("--num-rollout 2.5", "--num-rollout: '2.5' is not a whole number"),
        ("--num-rollout inf", "--num-rollout: 'inf' is not a whole number"),
        ("--advantage-estimator grp", "--advantage-estimator: 'grp' is not one of grpo, "),
        ("--train-env-vars {a:1}", "--train-env-vars: '{a:1}' is not JSON"),
        ("--train-env-vars [1]", "--train-env-vars: needs a JSON object"),
        ("--lr", "--lr: it takes one value, but has none"),
    ],
)
def test_bad_values_name_the_flag(line: str, problem: str) -> None:
    problems = read_command_line(line.split())[1]
    assert len(problems) == 1 and problems[0].startswith(problem), problems


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--lr", ["--lr: it takes one value, but has none"]),
        ("--colocate=true", ["--colocate: it takes no value, but has true"]),
        (
            "--lr --num-roll 3",
            ["--num-roll: no such flag", "--lr: it takes one value, but has none"],
        ),
        (
            "--lr --eps-clip",
            [
                "--lr: it takes one value, but has none",
                "--eps-clip: it takes one value, but has none",
            ],
        ),
        (
            "--use-tensorboard=1 --lr fast",
            ["--use-tensorboard: it", "--lr: 'fast'"],
        ),
    ],
)
def test_a_flag_without_its_value_hides_no_other_flag(
    workplace: Workplace, line: str, said: list[str]
) -> None:
    found = check_args([*workplace.required, *line.split()])[1]
    assert len(found) == len(said) and all(map(str.startswith, found, said)), found


def test_numbers_may_be_written_as_people_write_them() -> None:
    args, problems = read_command_line(
        ["--lr", "1e-6", "--update-weight-buffer-size", "1e9", "--rollout-top-k", "-1"]
    )
    assert problems == []
    assert (args.lr, args.update_weight_buffer_size, args.rollout_top_k) == (1e-6, 10**9, -1)


def test_repeated_eval_sets_are_appended() -> None:
    typed = "--eval-prompt-data aime a.jsonl --eval-prompt-data gsm8k b.jsonl math c.jsonl"
    args, problems = read_command_line(typed.split())
    assert problems == []
    assert args.eval_prompt_data == ["aime", "a.jsonl", "gsm8k", "b.jsonl", "math", "c.jsonl"]


def test_negative_flags_keep_their_names() -> None:
    args, _ = read_command_line(["--disable-grpo-std-normalization", "--no-use-tensorboard"])
    assert args.grpo_std_normalization is False
    assert args.rewards_normalization is True
    assert args.use_tensorboard is False


def test_user_arguments_are_added_and_slimes_definition_wins() -> None:
    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--my-flag", type=int, default=3)
        parser.add_argument("--lr", type=str, default="none")
        return parser

    args, problems = read_command_line(["--my-flag", "7", "--lr", "1e-3"], add)
    assert problems == []
    assert (args.my_flag, args.lr) == (7, 1e-3)
    assert read_command_line([], add)[0].my_flag == 3
    own: list[argparse.ArgumentParser] = []
    assert read_command_line([], own.append)[1] == [] and own, "it may return nothing"  # type: ignore[arg-type]


def test_args_survive_pickling_and_take_declared_attributes() -> None:
    args, _ = read_command_line(
        ["--sglang-log-level", "debug", "--tensor-model-parallel-size", "2", "--lr", "0.5"]
    )
    args.from_a_hook = [1]
    copy = pickle.loads(pickle.dumps(args))
    assert copy == args and copy.from_a_hook == [1]
    assert (copy.sglang_log_level, copy.tensor_model_parallel_size, copy.lr) == ("debug", 2, 0.5)
    with pytest.raises(AttributeError, match="did you mean rollout_batch_size"):
        _ = args.rollout_batchsize
    assert getattr(args, "nobody_knows", 5) == 5


def test_parse_args_prints_a_numbered_list_and_exits_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_args(
            ["--num-rolout", "3", "--lr", "x"], extra_checks=[lambda args: ["row 3 is not JSON"]]
        )
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "problems" in error
    for part in ("1. --num-rolout", "2. --lr", "--hf-checkpoint", "row 3 is not JSON"):
        assert part in error


def test_config_error_is_a_numbered_list_and_survives_pickling() -> None:
    error = ConfigError(["one", "two"])
    assert str(error) == "2 problems with the arguments\n  1. one\n  2. two"
    assert pickle.loads(pickle.dumps(error)).problems == ["one", "two"]
    assert str(ConfigError(["alone"])) == "alone"
    with pytest.raises(ConfigError):
        load_args(["--zzz"])


def test_help_needs_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {BLOCKED!r}:\n"
        "            raise ImportError('blocked: ' + name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "sys.argv = ['train.py', '--help']\n"
        "import runpy\n"
        f"runpy.run_path({str(CHECKOUT / 'train.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=CHECKOUT
    )
    assert done.returncode == 0, done.stderr
    for option in (
        "--rollout-batch-size N",
        "--advantage-estimator",
        "--sglang-",
        "algorithm:",
        "checkpoints:",
    ):
        assert option in done.stdout
    assert "--megatron-deepgemm" not in done.stdout  # refused flags stay out


@given(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=6),
        st.lists(st.integers()),
    )
)
def test_conversion_gives_the_type_or_says_why_not(value: object) -> None:
    for name in (
        "lr",
        "num_rollout",
        "colocate",
        "rollout_stop_token_ids",
        "train_env_vars",
        "hf_checkpoint",
    ):
        flag = FLAGS[name]
        try:
            converted = convert(flag, value)
        except ValueError as error:
            assert str(error)
            continue
        element = converted[0] if isinstance(converted, list) and converted else converted
        assert element is None or element == [] or isinstance(element, flag.value_type)


NUMBERS = [
    flag
    for flag in FLAGS.values()
    if flag.value_type in (int, float) and flag.kind in ("value", "list")
]


@pytest.mark.parametrize("name", [name for name, flag in FLAGS.items() if flag.status == "notice"])
def test_a_number_of_a_flag_without_effect_is_not_negative_either(name: str) -> None:
    flag = FLAGS[name]
    if flag.value_type in (int, float) and not flag.is_bool:
        _, problems = read_command_line([flag.option, "-5"])
        assert len(problems) == 1 and "least 0" in problems[0]


@pytest.mark.parametrize(
    "value", ["nan", "-nan", "inf", "-inf", "1e999", "1" * 400, float("nan"), 10**400]
)
def test_every_number_is_finite(value: object) -> None:
    """A threshold of NaN would never be passed: the alarm would be off, silently."""
    for flag in NUMBERS:
        with pytest.raises(ValueError):
            convert(flag, [value] if flag.takes_list else value)
    for option in (
        "--logprob-gap-threshold",
        "--audit-threshold",
        "--hidden-dropout",
        "--sglang-mem-fraction-static",
    ):
        _, problems = read_command_line([f"{option}={value}"])
        assert len(problems) == 1 and problems[0].startswith(option), problems


OUTSIDE = [
    *(
        "--rollout-max-prompt-len -5",
        "--data-pad-size-multiplier 0",
        "--data-pad-size-multiplier -5",
    ),
    *(
        "--log-probs-chunk-size -5",
        "--log-probs-chunk-size 0",
        "--sglang-router-request-timeout-secs 0",
    ),
    *(
        "--max-restarts -5",
        "--rollout-top-k 0",
        "--rollout-top-k -5",
        "--eval-top-k 0",
        "--eval-interval -5",
    ),
    *("--ckpt-step -5", "--lr-warmup-iters -5", "--lr-decay-iters -5", "--lr-wsd-decay-iters -5"),
    *("--eval-temperature -1", "--critic-lr -1", "--agent-timeout -1", "--num-steps-per-rollout 0"),
    *(
        "--rollout-num-gpus 99999999999999999999",
        "--rollout-num-gpus 1048577",
        "--rollout-stop-token-ids 5 -1",
    ),
]


@pytest.mark.parametrize("typed", OUTSIDE)
def test_numbers_outside_their_range_are_refused(typed: str, tmp_path: Path) -> None:
    option, *values = typed.split()
    _, problems = read_command_line([option, *values])
    assert len(problems) == 1 and problems[0].startswith(option)
    assert "must be" in problems[0] or "too large" in problems[0]
    file = tmp_path / "o.yaml"
    file.write_text(
        f"{option[2:]}: {json.dumps([int(value) for value in values]) if values[1:] else values[0]}"
    )
    assert any(option[2:] in problem for problem in read_settings(["--override", str(file)])[1])


def test_defaults_lie_in_their_range() -> None:
    wrong = [
        flag.option
        for flag in NUMBERS
        if flag.status != "refused" and out_of_range(flag, flag.default)
    ]
    assert not wrong and any(range_text(flag) for flag in NUMBERS)


def test_off_values_are_taken() -> None:
    args, problems = read_command_line(
        ["--rollout-top-k", "-1", "--eval-top-k", "-1", "--log-probs-chunk-size", "-1"]
    )
    assert (
        problems == [] and args.rollout_top_k == args.eval_top_k == args.log_probs_chunk_size == -1
    )
