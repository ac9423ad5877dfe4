"""What is wrong with a command or a file of settings is one line, whatever it holds; never a
traceback.
"""

from __future__ import annotations

import pytest

from slime.config.args import FLAGS
from slime.config.hooks import AWAITED, CALLS, call_problem
from slime.config.machine import Machine

FILE_FLAGS = sorted(
    name
    for name, flag in FLAGS.items()
    if flag.kind in ("path", "pairs") and flag.status == "works"
)
HOOK_FLAGS = [
    "custom_generate_function_path",
    "custom_rm_path",
    "data_source_path",
    "rollout_function_path",
]
GPUS = Machine(gpus=8, cores=32, in_cluster=False)


def one_problem(workplace, line: list[str], part: str) -> None:
    from slime.config.parser import ConfigError, load_args

    with pytest.raises(ConfigError) as failure:
        load_args([*workplace.required, *line])
    found = [problem for problem in failure.value.problems if part in problem]
    assert found and all("\n" not in problem and len(problem) < 1000 for problem in found), (
        failure.value.problems
    )


def test_the_calls_of_hooks_are_of_flags() -> None:
    assert set(CALLS) <= set(FLAGS) and len(FILE_FLAGS) > 20


@pytest.mark.parametrize("name", [*FILE_FLAGS, *HOOK_FLAGS])
@pytest.mark.parametrize(
    "value", ["x" * 300, "a/" + "ü" * 200, "a\0b", "~nobody-of-this-name/x", "/x" * 3000]
)
def test_names_that_no_file_can_have(workplace, name: str, value: str) -> None:
    one_problem(workplace, [FLAGS[name].option, value], FLAGS[name].option)


def test_words_that_are_not_utf8(workplace) -> None:
    one_problem(workplace, ["--run-name", "caf\udce9"], "--run-name: 'caf\\udce9' is not UTF-8")


@pytest.mark.parametrize("name", ["latest", "../x", "a/b", "..", ""])
def test_a_run_name_that_is_no_folder_of_its_own(workplace, name: str) -> None:
    one_problem(workplace, [f"--run-name={name}"], f"--run-name: {name!r}")


DEEP = b"[" * 1500
READERS = ("--override", "--custom-config-path", "--sglang-config", "--eval-config")
NO_YAML = [
    ("é: 1".encode("latin-1"), "UTF-8"),
    (DEEP, "not valid YAML"),
    (b"a: 2001-99-99", ""),
    (b"a: &a [*a]", ""),
    (b"!!python/object:os.system x", "not valid YAML"),
    (b"a: \x00", "not valid YAML"),
    (b"- 1", ""),
]


@pytest.mark.parametrize(
    ("option", "content", "part"),
    [  # PyYAML takes seconds for what is nested deeply
        pytest.param(
            option,
            *case,
            marks=[pytest.mark.long] if case[0] == DEEP and option != "--override" else [],
        )
        for option in READERS
        for case in NO_YAML
    ],
)
def test_yaml_that_is_none(workplace, option: str, content: bytes, part: str) -> None:
    from slime.data.validate import check_data
    from slime.rollout.rm_hub import check_label

    file = workplace.root / "x.yaml"
    file.write_bytes(content)
    backend = ["--rollout-backend", "sglang"] if option == "--sglang-config" else []
    problems = workplace.problems(" ".join([*backend, option, str(file)]))
    if option == "--eval-config":
        problems += check_data(workplace.load_unchecked([option, str(file)]), check_label)
    assert any(str(file) in problem and part in problem for problem in problems) or not part, (
        problems
    )
    assert all("\n" not in problem for problem in problems)


@pytest.mark.parametrize(
    "name", ["explicit", "megatron", "sglang", "router", "notices", "__class__", "__dict__"]
)
@pytest.mark.parametrize("option", ["--override", "--custom-config-path"])
def test_a_file_cannot_set_what_is_no_flag(workplace, name: str, option: str) -> None:
    file = workplace.write("x.yaml", f"{name}: 5\n")
    one_problem(workplace, [option, file], f"{name}: slime sets this itself")


@pytest.mark.parametrize(
    "setting",
    [
        "label_key: {a: 1}",
        "input_key: [a]",
        "n_samples_per_eval_prompt: x",
        "n_samples_per_eval_prompt: true",
        "temperature: .nan",
        "top_k: 1.5",
        "rm_type: {a: 1}",
        "multimodal_keys: {image: 5}",
        "stop: {a: 1}",
        "path: {a: 1}",
        "apply_chat_template: 2",
        "metadata_overrides: [1]",
        "no_stop_trim: perhaps",
        "repetition_penalty: x",
    ],
)
def test_settings_of_evaluation_sets_have_types(workplace, setting: str) -> None:
    from slime.data.validate import check_data
    from slime.rollout.rm_hub import check_label

    key = setting.partition(":")[0]
    text = f"eval: {{datasets: [{{name: a, path: {workplace.data}, {setting}}}]}}"
    if key == "path":
        text = f"eval: {{datasets: [{{name: a, {setting}}}]}}"
    problems = check_data(
        workplace.load_unchecked(["--eval-config", workplace.write("e.yaml", text)]), check_label
    )
    assert len(problems) == 1 and f"evaluation data set 'a': {key}" in problems[0], problems


@pytest.mark.parametrize(
    "text", ["eval: {datasets: 5}", "eval: {defaults: 5, datasets: [1]}", "eval: {datasets: [5]}"]
)
def test_evaluation_files_of_another_shape(workplace, text: str) -> None:
    from slime.data.validate import check_data
    from slime.rollout.rm_hub import check_label

    problems = check_data(
        workplace.load_unchecked(["--eval-config", workplace.write("e.yaml", text)]), check_label
    )
    assert len(problems) == 1 and "eval" in problems[0]


@pytest.mark.parametrize("value", ["null", "other.yaml", "5"])
def test_an_override_file_names_no_other(workplace, value: str) -> None:
    file = workplace.write("x.yaml", f"override: {value}\nhf_checkpoint: {workplace.model}\n")
    one_problem(workplace, ["--override", file], "cannot name another")


def test_deep_json_and_other_odd_values(workplace) -> None:
    one_problem(
        workplace, ["--apply-chat-template-kwargs", '{"a":' * 5000], "--apply-chat-template-kwargs"
    )
    one_problem(workplace, ["--multimodal-keys", '{"image": {"a": 1}}'], "'image' needs a text")
    one_problem(workplace, ["--rollout-num-gpus", "9" * 20], "--rollout-num-gpus")
    file = workplace.write("x.yaml", "sglang_attention_backend: {a: 1}\nload: [1]\nrm_type: {}\n")
    for part in ("sglang_attention_backend", "load: it takes one value", "rm_type: needs a text"):
        one_problem(workplace, ["--override", file], part)


# --- hooks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "part"),
    [
        ("import sys; sys.exit(0)", "importing it called sys.exit(0)"),
        ("exit()", "importing it called sys.exit()"),
        ("raise SystemExit('done')", "importing it called sys.exit('done')"),
        ("raise KeyboardInterrupt", "failed with KeyboardInterrupt"),
        ("raise GeneratorExit", "failed with GeneratorExit"),
        ("1 / 0", "failed with ZeroDivisionError"),
    ],
)
def test_a_hook_file_that_ends_the_program_is_an_error_with_its_name(
    workplace, statement: str, part: str
) -> None:
    file = workplace.write("reward.py", f"{statement}\nasync def f(args, sample): return 1.0\n")
    one_problem(workplace, ["--custom-rm-path", f"{file}:f"], part)
    one_problem(workplace, ["--custom-rm-path", f"{file}:f"], file)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_hook_with_other_parameters_is_told_before_it_is_called(workplace, name: str) -> None:
    words = CALLS[name]
    good = words[words.index("(") + 1 : -1].replace("=…", "")
    namespace: dict[str, object] = {}
    exec(f"def good({good}): ...\ndef bad({good}, one_more): ...", namespace)
    assert call_problem(name, namespace["good"]) is None
    problem = str(call_problem(name, namespace["bad"]))
    assert words in problem and "one_more" in problem
    assert "not a function" in str(call_problem(name, 5))

    async def awaited(*values: object, **more: object) -> None: ...

    assert ("async def" in str(call_problem(name, awaited))) == (name not in AWAITED)


@pytest.mark.parametrize(
    "parameters", ["completions, **columns", "prompts, completions, **columns"]
)
def test_a_reward_of_trl_is_told_where_it_can_be_used(workplace, parameters: str) -> None:
    file = workplace.write("trl.py", f"def f({parameters}): return [1.0]\n")
    one_problem(workplace, ["--custom-rm-path", f"{file}:f"], "slime.train")


def test_a_hook_with_other_parameters_is_a_problem_of_the_command(workplace) -> None:
    file = workplace.write("hooks.py", "def keep(args): ...\nnumber = 5\n")
    one_problem(
        workplace,
        ["--buffer-filter-path", f"{file}:keep"],
        "slime calls it as fn(args, rollout_id, buffer",
    )
    one_problem(workplace, ["--custom-rm-path", f"{file}:number"], "it is a int, not a function")


def test_a_reward_of_another_framework_is_told_and_a_reward_model_is_not(workplace) -> None:
    file = workplace.write(
        "rewards.py",
        "def score(data_source, solution, truth): ...\n"
        "class Model:\n    def __init__(self): ...\n    def compute_reward(self, prompts, responses): ...\n",
    )
    told = "slime calls it as fn(args, sample), but it is defined as score(data_source"
    one_problem(workplace, ["--custom-rm-path", f"{file}:score"], told)
    assert workplace.problems(f"--custom-rm-path {file}:Model") == []


# --- what fails only when it is first used -------------------------------------------------------


def test_routing_replay_needs_an_engine_that_records(workplace) -> None:
    workplace.use(GPUS)
    for backend in ("fsdp", "megatron"):
        line = f"--train-backend {backend} --use-rollout-routing-replay --rollout-backend sglang"
        assert not any("routing-replay" in p for p in workplace.problems(line))
    asked = workplace.problems(f"{line} --sglang-device cpu")
    assert any("routing-replay" in p for p in asked)


def test_routing_replay_is_not_for_engines_on_a_cpu(workplace) -> None:
    moe = "--train-backend megatron --use-rollout-routing-replay"
    assert any(
        "chosen experts" in p for p in workplace.problems(f"{moe} --rollout-backend embedded")
    )
    on_cpu = workplace.problems(f"{moe} --rollout-backend sglang")
    assert any("--use-rollout-routing-replay" in p for p in on_cpu)
