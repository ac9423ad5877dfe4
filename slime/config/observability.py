"""Metrics, dumps, profiles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.flag import flag, flags_of
from slime.config.rollout import DEFAULT_ROLLOUT_FUNCTION

if TYPE_CHECKING:
    from slime.config.args import Args


@dataclass
class ObservabilityConfig:
    _title = "observability"

    use_tensorboard: bool = flag(True, kind="toggle", help="TensorBoard events in the run's folder")
    tb_project_name: str | None = flag(
        None,
        help="folder of TensorBoard events beside the run's own, with --tb-experiment-name",
    )
    tb_experiment_name: str | None = flag(None, help="last part of that folder's path; default: the run's name")
    use_wandb: bool = flag(False, help="log to Weights & Biases too")
    wandb_mode: str | None = flag(None, choices=("online", "offline", "disabled"), help="default: the environment's")
    wandb_dir: str | None = flag(None, help="folder of its files")
    wandb_key: str | None = flag(None, help="API key; `ps` shows it to everyone: better set WANDB_API_KEY")
    wandb_host: str | None = flag(None, help="server")
    wandb_team: str | None = flag(None, help="entity")
    wandb_group: str | None = flag(None, help="group")
    wandb_project: str | None = flag(None, help="project")
    wandb_run_id: str | None = flag(None, help="go on with this run")
    wandb_always_use_train_step: bool = flag(False, help="x-axis in optimizer steps")
    log_multi_turn: bool = flag(False, help="metrics of multi-turn samples")
    log_passrate: bool = flag(False, help="pass@k of the training groups")
    log_correct_samples: bool = flag(
        False,
        help="means over the correct samples apart, as rollout/correct-<name>",
    )
    log_reward_category: str | None = flag(None, help="entry of a dict reward to count by")
    log_samples: str = flag(
        "all",
        metavar="all|none|N",
        help="samples whose texts are written to samples/ of the run: all, none, or N of each rollout and data set of "
        "an evaluation, at even distances",
    )
    log_keep_last: int | None = flag(
        None, low=1, help="keep the texts and traces of the newest N rollouts and evaluations only; default: all"
    )
    log_compress: bool = flag(False, help="write the texts as .jsonl.zst; zstdcat reads them")


def log_samples_count(value: str) -> int | None:
    """The number that ``--log-samples`` means: None for ``all``, 0 for ``none``.

    Raises:
        ValueError: it means none.
    """
    if value in ("all", "none"):
        return None if value == "all" else 0
    if not (value.isascii() and value.isdigit()):
        raise ValueError(f"--log-samples {value}: give all, none, or the number of samples to write of each rollout")
    return int(value)


@dataclass
class DebugConfig:
    _title = "debugging and profiling"

    debug_rollout_only: bool = flag(False, help="no trainer")
    debug_train_only: bool = flag(
        False, help="no engines; needs --load-debug-rollout-data or a rollout function that asks none, such as SFT's"
    )
    save_debug_rollout_data: str | None = flag(None, help="template of a dump of each rollout, with {rollout_id}")
    load_debug_rollout_data: str | None = flag(None, help="train on such dumps; implies --debug-train-only")
    load_debug_rollout_data_subsample: float | None = flag(None, above=0, high=1, help="share of the dump to use")
    load_forge_rollout_data: str | None = flag(
        None,
        help="template of dumps that slime.rollout.forge_load replays with engines alive",
    )
    save_debug_train_data: str | None = flag(
        None,
        help="template of a dump of each rollout's train batches, with {rollout_id}",
    )
    dump_details: str | None = flag(
        None,
        help="folder; sets both dumps to rollout_data/ and train_data/ in it and keeps the tokenizer",
    )
    record_memory_history: bool = flag(False, help="record CUDA allocations of the trainer's first rollouts")
    memory_snapshot_num_steps: int | None = flag(None, low=1, help="rollouts that are recorded; default 1")
    memory_snapshot_dir: str | None = flag(None, help="folder of the record; default: traces/ of the run")
    memory_recorder: str = flag(
        "torch",
        choices=("torch", "memray"),
        help="recorder of memory",
        limits={"memray": ("refused", "it records host memory: attach memray to the process in question")},
    )
    use_pytorch_profiler: bool = flag(False, help="traces of the trainer by torch's profiler, in traces/")
    profile_step_start: int = flag(1, low=0, help="first rollout to profile")
    profile_step_end: int = flag(2, low=0, help="first rollout not to")
    profile_target: list[str] = flag(
        ["train_overall"],
        choices=("train_overall", "train_actor", "train_log_probs"),
        help="what is profiled: all the trainer does, the optimizer's steps, the passes that score",
    )


@dataclass
class MegatronExtrasConfig:
    _title = "hooks of the Megatron backend"

    custom_megatron_init_path: str | None = flag(
        None, kind="hook", help="called once Megatron's groups exist: fn(args)"
    )
    custom_megatron_before_log_prob_hook_path: str | None = flag(
        None, kind="hook", help='called before log-probs: fn(args, model, prefix), prefix "", "ref_" or "teacher_"'
    )
    custom_megatron_before_train_step_hook_path: str | None = flag(
        None,
        kind="hook",
        help="called before a step: fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)",
    )


def derive_debug_modes(args: Args) -> None:
    if args.load_debug_rollout_data:
        args.debug_train_only = True
    if args.load_forge_rollout_data and args.rollout_function_path == DEFAULT_ROLLOUT_FUNCTION:
        args.rollout_function_path = "slime.rollout.forge_load.generate_rollout"
    if args.dump_details:
        for name, folder in (("save_debug_rollout_data", "rollout_data"), ("save_debug_train_data", "train_data")):
            if getattr(args, name) is None:
                setattr(args, name, str(Path(args.dump_details) / folder / "{rollout_id}.pt"))
    if args.debug_rollout_only:
        args.colocate = args.offload = False
        args.offload_train = args.offload_rollout = False


def check_debug_files(args: Args) -> list[str]:
    problems = []
    if args.debug_train_only and args.debug_rollout_only:
        problems.append(
            "--debug-rollout-only and --debug-train-only (or --load-debug-rollout-data) leave nothing to run: drop one"
        )
    makes_own = args.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION  # SFT needs no engines
    if args.debug_train_only and not args.load_debug_rollout_data and not makes_own:
        problems.append(
            "--debug-train-only needs rollouts to train on: --load-debug-rollout-data TEMPLATE, or a "
            "--rollout-function-path that asks no engine, such as slime.rollout.sft_rollout.generate_rollout"
        )
    flags = flags_of(type(args))
    for name in (
        "save_debug_rollout_data",
        "load_debug_rollout_data",
        "save_debug_train_data",
        "load_forge_rollout_data",
    ):
        template = getattr(args, name)
        if template and "{rollout_id}" not in template:
            problems.append(f"{flags[name].option} {template}: needs {{rollout_id}}, one file for each rollout")
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
        flags = flags_of(type(args)).items()
        idle = [flag.option for name, flag in flags if name.startswith("wandb_") and name in args.explicit]
        idle = [option for option in idle if option != "--wandb-always-use-train-step"]
        if idle:
            args.notices.append(f"{', '.join(idle)}: no effect without --use-wandb")
    problems = []
    if args.tb_experiment_name and not args.tb_project_name:
        problems.append("--tb-experiment-name needs --tb-project-name, the folder that it lies in")
    try:
        log_samples_count(args.log_samples)
    except ValueError as error:
        problems.append(str(error))
    return problems
