"""Files, folders and hooks that the flags name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slime.config.args import FLAGS, Args
from slime.config.data_peek import file_of, first_row
from slime.config.defaults import needs_reward
from slime.config.evaluation import eval_pairs
from slime.config.hf_config import is_hf_folder, looks_like_hub_id, megatron_folder
from slime.config.hook_calls import call_problem
from slime.config.hooks import HookError, load_function
from slime.config.overrides import read_yaml

HOOK_NAMES = {"custom_generate_function_path": "custom_generate", "custom_rm_path": "CustomRewardModel"}
"""What a bare ``file.py`` means, where the seeds show a name."""

_DERIVED = ("eval_function_path",)


def check_checkpoint(args: Args) -> list[str]:
    if args.hf_checkpoint is None:
        return [
            "no --hf-checkpoint: name a Hugging Face folder or hub id with the weights and the tokenizer "
            "(MODEL_ARGS describe only the shape)"
        ]
    return _hf_problem("--hf-checkpoint", args.hf_checkpoint)


def _hf_problem(option: str, name: str) -> list[str]:
    folder = Path(name).expanduser()
    if is_hf_folder(name) or (not folder.exists() and looks_like_hub_id(name)):
        return []
    if folder.is_dir():
        return [f"{option} {name}: no config.json there; it needs a Hugging Face folder"]
    return [f"{option} {name}: no such folder, and not the form of a hub id (owner/model)"]


def check_reference(args: Args) -> list[str]:
    uses = args.use_kl_loss or args.kl_coef != 0
    if args.ref_load is None or args.ref_load == args.hf_checkpoint:
        return []
    if args.train_backend == "megatron" and megatron_folder(args.ref_load):
        return []
    problems = _hf_problem("--ref-load", args.ref_load)
    if not problems:
        return []
    if not uses:
        args.notices.append(f"{problems[0]}; nothing uses a reference model, so it is left aside")
        return []
    return [
        f"{problem}; the KL needs it (without --ref-load, --hf-checkpoint is the reference)" for problem in problems
    ]


def check_teacher(args: Args) -> list[str]:
    if not args.opd_teacher_load or (args.train_backend == "megatron" and megatron_folder(args.opd_teacher_load)):
        return []
    return _hf_problem("--opd-teacher-load", args.opd_teacher_load)


def check_load(args: Args) -> list[str]:
    if args.load is None or args.load == args.save or Path(args.load).expanduser().exists():
        return []
    if looks_like_hub_id(args.load):
        return []
    return [f"--load {args.load}: no such folder (a first run may name the folder of --save)"]


def check_data_files(args: Args) -> list[str]:
    needs_data = args.rollout_global_dataset and not args.load_debug_rollout_data
    custom_source = args.data_source_path != FLAGS["data_source_path"].default
    if args.prompt_data is None:
        if needs_data and not custom_source:
            return ["no --prompt-data: name a JSONL or Parquet file (or a source of your own with --data-source-path)"]
        return []
    if file_of(args.prompt_data).is_file() or custom_source:
        return []
    return [f"--prompt-data {args.prompt_data}: no such file"]


def check_multimodal_keys(args: Args) -> list[str]:
    wrong = {kind: column for kind, column in (args.multimodal_keys or {}).items() if not isinstance(column, str)}
    return [f"--multimodal-keys: {kind!r} needs the name of a column, not {column!r}" for kind, column in wrong.items()]


def check_scored(args: Args) -> list[str]:
    row = first_row(args.prompt_data) if args.prompt_data and args.rollout_global_dataset else None
    if row is None or not needs_reward(args) or args.custom_generate_function_path:
        return []
    if "rm_type" in str(row.get(args.metadata_key)):
        return []
    return [
        f"nothing scores the samples: give --rm-type or --custom-rm-path (rows of {args.prompt_data} have no label; "
        f"their columns: {', '.join(map(str, row))})"
    ]


def check_eval_files(args: Args) -> list[str]:
    pairs, problems = eval_pairs(args.eval_prompt_data or [])
    problems += [
        f"--eval-prompt-data {name} {path}: no such file" for name, path in pairs if not file_of(path).is_file()
    ]
    names = [name for name, _ in pairs]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        problems.append(f"--eval-prompt-data: {', '.join(doubled)} names two data sets; give each its own name")
    if args.eval_config:
        problems += read_yaml(args.eval_config, "--eval-config")[1]
    return problems


def check_disk_sync(args: Args) -> list[str]:
    problems = []
    if args.update_weight_transport == "disk" and args.update_weight_disk_dir is None:
        problems.append(
            "--update-weight-transport disk needs --update-weight-disk-dir, a folder that trainer and engines share"
        )
    if args.update_weight_mode == "delta" and args.update_weight_transport != "disk":
        problems.append("--update-weight-mode delta goes through files: add --update-weight-transport disk")
    if args.update_weight_mode == "delta" and args.colocate:
        problems.append(
            "--update-weight-mode delta is for engines elsewhere: with --colocate all weights are handed over within "
            "the GPU, in less time than a comparison takes. Leave --update-weight-mode out"
        )
    return problems


def check_debug_files(args: Args) -> list[str]:
    problems = []
    if args.debug_train_only and args.debug_rollout_only:
        problems.append(
            "--debug-rollout-only and --debug-train-only (or --load-debug-rollout-data) leave nothing to run: drop one"
        )
    makes_own = args.rollout_function_path != FLAGS["rollout_function_path"].default  # SFT needs no engines
    if args.debug_train_only and not args.load_debug_rollout_data and not makes_own:
        problems.append(
            "--debug-train-only needs rollouts to train on: --load-debug-rollout-data TEMPLATE, or a "
            "--rollout-function-path that asks no engine, such as slime.rollout.sft_rollout.generate_rollout"
        )
    for name in (
        "save_debug_rollout_data",
        "load_debug_rollout_data",
        "save_debug_train_data",
        "load_forge_rollout_data",
    ):
        template = getattr(args, name)
        if template and "{rollout_id}" not in template:
            problems.append(f"{FLAGS[name].option} {template}: needs {{rollout_id}}, one file for each rollout")
    if args.save_debug_train_data and args.save_debug_train_data == args.save_debug_rollout_data:
        problems.append("--save-debug-train-data and --save-debug-rollout-data name the same files: give two templates")
    if args.load_debug_rollout_data_subsample is not None and not args.load_debug_rollout_data:
        problems.append("--load-debug-rollout-data-subsample needs --load-debug-rollout-data")
    if args.profile_step_end <= args.profile_step_start:
        problems.append(f"--profile-step-end {args.profile_step_end}: needs to be above --profile-step-start")
    template = args.load_debug_rollout_data
    if template and not Path(template).expanduser().parent.is_dir() and "{" not in str(Path(template).parent):
        problems.append(f"--load-debug-rollout-data {template}: no such folder")
    return problems


def check_sinks(args: Args) -> list[str]:
    if not args.use_wandb:
        idle = [flag.option for name, flag in FLAGS.items() if name.startswith("wandb_") and name in args.explicit]
        idle = [option for option in idle if option != "--wandb-always-use-train-step"]
        if idle:
            args.notices.append(f"{', '.join(idle)}: no effect without --use-wandb")
    if args.tb_experiment_name and not args.tb_project_name:
        return ["--tb-experiment-name needs --tb-project-name, the folder that it lies in"]
    return []


def check_hooks(args: Args) -> list[str]:
    """Every function that a flag names can be found."""
    return [problem for option, name, path in _hooks(args) if (problem := hook_problem(option, name, path))]


def _hooks(args: Args) -> Iterator[tuple[str, str, str]]:
    for name, flag in FLAGS.items():
        value = getattr(args, name)
        if name in _DERIVED and value == args.rollout_function_path:
            continue
        if flag.kind == "hook" and value is not None and value != flag.default:
            yield flag.option, name, value
        if flag.kind == "repeat":
            yield from ((flag.option, name, path) for path in value)


def hook_problem(option: str, name: str, path: str) -> str | None:
    """Why what ``path`` names cannot be imported or called as the flag ``name`` is; None where it can."""
    try:
        function = load_function(path, HOOK_NAMES.get(name))
    except HookError as error:
        return f"{option}: {error}"
    except SystemExit as error:  # a script without a check of __name__: train.py would end with its status
        called = f"importing it called sys.exit({'' if error.code is None else repr(error.code)})"
        return f"{option} {path}: {called}; put what the file does as a script below if __name__ == '__main__'"
    except (Exception, KeyboardInterrupt, GeneratorExit) as error:  # the user's module ran and failed: any error
        return f"{option} {path}: importing it failed with {type(error).__name__}: {error}"
    problem = call_problem(name, function)
    return f"{option} {path}: {problem}" if problem else None


FILE_RULES = (
    check_checkpoint,
    check_reference,
    check_teacher,
    check_load,
    check_disk_sync,
    check_debug_files,
    check_sinks,
    check_hooks,
    check_multimodal_keys,
)

DATA_RULES = (check_data_files, check_scored, check_eval_files)
"""What can be said of the data without reading it; the data room's own check says more."""
