"""YAML files: the user's own configuration first, the override last of all, both checked."""

from __future__ import annotations

import yaml
from config_parts import Workplace
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from needs import of_all

from slime.config.args import FLAGS, Args
from slime.config.parser import load_args, read_command_line, read_settings
from slime.config.settings import set_value, to_dict


def test_override_beats_custom_config_beats_command_line(workplace) -> None:
    custom = workplace.write(
        "custom.yaml", "lr: 2.0e-5\nmax_turns: 7\nrollout_batch_size: 16\nmy_tool: search\n"
    )
    override = workplace.write(
        "laptop.yaml",
        "rollout_batch_size: 4\nglobal-batch-size: 8\n--n-samples-per-prompt: 2\n"
        "sglang_mem_fraction_static: 0.5\n",
    )
    args = workplace.load(
        f"--lr 1e-3 --rollout-batch-size 32 --custom-config-path {custom} --override {override}"
    )
    assert (args.lr, args.max_turns, args.my_tool) == (2e-5, 7, "search")
    assert (args.rollout_batch_size, args.global_batch_size, args.n_samples_per_prompt) == (4, 8, 2)
    (printed,) = [notice for notice in args.notices if notice.startswith("--override")]
    assert "rollout_batch_size: 16 -> 4" in printed and "global_batch_size: None -> 8" in printed
    assert "sglang_mem_fraction_static: None -> 0.5" in printed


def test_a_custom_config_cannot_set_what_is_computed(workplace) -> None:
    custom = workplace.write("custom.yaml", "critic_gpus: 3")
    assert "critic_gpus: no such flag" in workplace.problems(f"--custom-config-path {custom}")[0]


def test_custom_config_is_checked_with_everything_else(workplace) -> None:
    custom = workplace.write("custom.yaml", "use_tis: true\nuse_rollout_logprobs: true\nlr: fast\n")
    problems = workplace.problems(f"--custom-config-path {custom}")
    assert len(problems) == 2
    assert any("lr: 'fast'" in problem for problem in problems)
    assert any("--use-tis" in problem for problem in problems)


def test_rejection_needs_the_function_that_rejects(workplace) -> None:
    flags = f"--custom-config-path {workplace.write('custom.yaml', 'use_rs: true')}"
    (problem,) = workplace.problems(flags)
    assert "use_rs" in problem and "needs --custom-tis-function-path" in problem
    workplace.load(f"{flags} --custom-tis-function-path slime.algorithms.mis.compute_mis_weights")


def test_override_rejects_names_that_are_no_flags(workplace) -> None:
    override = workplace.write("o.yaml", "rolout_batch_size: 4\nsglang_mem_fraction: 0.5\n")
    problems = workplace.problems(f"--override {override}")
    assert len(problems) == 2
    assert "rollout_batch_size" in problems[0]
    assert "sglang_mem_fraction_static" in problems[1]


def test_files_that_are_not_there_or_not_mappings(workplace) -> None:
    listing, none = workplace.write("list.yaml", "- 1\n"), workplace.write("none.yaml", "[]")
    broken = workplace.write("broken.yaml", "a: [1\n")
    assert "No such file" in workplace.problems("--override absent.yaml")[0]
    assert "needs a mapping" in workplace.problems(f"--override {listing}")[0]
    assert "needs a mapping" in workplace.problems(f"--override {none}")[0]
    assert "YAML" in workplace.problems(f"--custom-config-path {broken}")[0]
    assert workplace.problems(f"--override {workplace.write('empty.yaml', '')}") == []
    twice = workplace.write("twice.yaml", "lr: 1e-6\nseed: 3\nlr: 2e-6\n")
    (problem,) = workplace.problems(f"--override {twice}")
    assert "'lr'" in problem and "line 3" in problem, "PyYAML would take the last one"
    merged = workplace.write("merged.yaml", "x: &x {a: 1}\ny: {<<: *x, a: 2}\nz: {<<: *x}\n")
    args = workplace.load(f"--custom-config-path {merged}")
    assert (args.y, args.z) == ({"a": 2}, {"a": 1})


def test_pass_through_flags_can_be_set_and_unset(workplace) -> None:
    override = workplace.write(
        "o.yaml",
        "num_layers: null\n"
        "sglang_mem_fraction_static: '0.5'\n"
        "router_policy: manual\n"
        "swiglu: true\n",
    )
    args = workplace.load(f"--num-layers 2 --override {override}")
    assert args.num_layers == 36 and "num_layers" not in args.megatron
    assert (args.sglang_mem_fraction_static, args.router_policy, args.swiglu) == (
        0.5,
        "manual",
        True,
    )


def test_another_checkpoint_in_the_override_silences_model_args(workplace) -> None:
    override = workplace.write("o.yaml", f"hf_checkpoint: {workplace.model}\n")
    args = workplace.load(f"--num-layers 61 --hidden-size 7168 --override {override}")
    assert "num_layers" not in args.megatron
    assert any("another model" in notice for notice in args.notices)


def test_negative_flags_by_either_name() -> None:
    args, _ = read_command_line([])
    assert set_value(vars(args), "disable_grpo_std_normalization", True) is None
    assert args.grpo_std_normalization is False
    assert set_value(vars(args), "grpo_std_normalization", True) is None
    assert args.grpo_std_normalization is True


def test_a_file_takes_the_options_of_packages_as_the_command_line_does(
    workplace: Workplace,
) -> None:
    lines = [
        "no_rope_fusion: true",
        "disable_bias_linear: false",
        "sglang_ep: 2",
        "sglang_cuda_graph_bs: [1, 2]",
    ]
    lines += [
        "sglang_no_lora_strict_loading: true",
        "sglang-data-parallel-size: 4",
        "sglang_enable_hicache: null",
    ]
    for option in ("--override", "--custom-config-path"):
        file = workplace.write("options.yaml", "\n".join(lines))
        args, problems = read_settings(["--sglang-enable-hicache", option, file])
        assert problems == []
        assert args.megatron == {"apply_rope_fusion": False, "add_bias_linear": True}
        wanted = {
            "ep_size": 2,
            "cuda_graph_bs_decode": [1, 2],
            "lora_strict_loading": False,
            "dp_size": 4,
        }
        assert args.sglang == wanted
    assert "mean sglang_expert_parallel_size?" in str(
        set_value(vars(args), "sglang_expert_paralel_size", 2)
    )


def test_dump_holds_everything_and_no_secret(workplace) -> None:
    args = workplace.load(
        "--wandb-key s3cret --tensor-model-parallel-size 1 --sglang-log-level debug --lr 1e-5"
    )
    args.from_a_hook = {"depth": [1, 2]}
    args.not_plain = object()
    text = yaml.safe_dump(to_dict(vars(args)))
    assert "s3cret" not in text
    loaded = yaml.safe_load(text)
    assert (
        loaded["lr"] == 1e-5
        and loaded["sglang_log_level"] == "debug"
        and loaded["from_a_hook"] == {"depth": [1, 2]}
    )
    assert loaded["use_critic"] is False and "not_plain" not in loaded and "explicit" not in loaded
    assert set(FLAGS) - set(loaded) == {"override"}


@settings(
    max_examples=of_all(25, 4),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.integers(1, 8), st.floats(1e-6, 1.0), st.booleans(), st.sampled_from(["grpo", "gspo", "ppo"])
)
def test_a_dumped_run_is_an_override_that_repeats_it(
    workplace, prompts: int, lr: float, shuffle: bool, kind: str
) -> None:
    line = f"--rollout-batch-size {prompts} --lr {lr} --advantage-estimator {kind} --run-name r"
    first = workplace.load(line + " --rollout-shuffle" * shuffle)
    dump = {name: value for name, value in to_dict(vars(first)).items() if name in FLAGS}
    again = workplace.load(f"--override {workplace.write('dump.yaml', yaml.safe_dump(dump))}")
    for name in FLAGS:
        if name != "override":
            assert getattr(again, name) == getattr(first, name), name


def test_a_reference_that_was_the_model_goes_with_it(workplace) -> None:
    override = workplace.write("o.yaml", f"hf_checkpoint: {workplace.model}\n")
    words = (
        f"--prompt-data {workplace.data} --hf-checkpoint models/other --override {override}".split()
    )
    assert load_args([*words, "--ref-load", "models/other"]).ref_load == workplace.model
    assert load_args([*words, "--ref-load", "models/third"]).ref_load == "models/third"


def test_a_key_that_is_gone_or_of_another_framework_is_refused_with_the_reason() -> None:
    assert "with --rollout-external-engine-addrs" in str(
        set_value(vars(Args()), "rollout_external", True)
    )
    assert "use --lora-rank R" in str(set_value(vars(Args()), "use_peft", True))


def test_the_home_folder_is_found_in_every_form(workplace, monkeypatch) -> None:
    """A shell replaces ``~`` only at the beginning of a word. With a literal ``~`` a resume would
    start afresh.
    """
    monkeypatch.setenv("HOME", str(workplace.root / "home"))
    (workplace.root / "home" / "checkpoints").mkdir(parents=True)
    override = workplace.write("o.yaml", "save: ~/checkpoints\nsave_hf: ~/hf/{rollout_id}\n")
    args = workplace.load(f"--load=~/checkpoints --output-dir=~/outputs --override {override}")
    home = str(workplace.root / "home")
    assert (args.load, args.save) == (f"{home}/checkpoints", f"{home}/checkpoints")
    assert (args.save_hf, args.output_dir) == (f"{home}/hf/{{rollout_id}}", f"{home}/outputs")
