"""Flags of metrics, debug data, and profiling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slime.config.files import rollout_template
from slime.config.flag import Section, flag, path_flag


def log_samples_count(value: str) -> int | None:
    """Return the number in ``--log-samples``: None for ``all``, 0 for ``none``.

    Raises:
        ValueError: The value is neither of these words nor a number.
    """
    if value in ("all", "none"):
        return None if value == "all" else 0
    if not (value.isascii() and value.isdigit()):
        raise ValueError(f"{value} must be all, none, or the number of samples per rollout")
    return int(value)


@dataclass
class ObservabilityConfig(Section):
    _title = "observability"

    tracker: list[str] | None = flag(kind_of_part="tracker", or_hook=True)
    """Trackers of the run: any of tensorboard, wandb, mlflow, trackio and swanlab, with spaces or
    commas between them, and classes of your own (file.py:Name). Default: tensorboard, and wandb
    with --use-wandb"""
    tracker_project: str = "slime"
    """Project of the run in Trackio and SwanLab, experiment of it in MLflow"""
    use_tensorboard: bool = True
    """Write TensorBoard events to the run's folder"""
    tb_project_name: str | None = None
    """Folder in tensorboard_log/ for TensorBoard events. Default: the run's folder"""
    tb_experiment_name: str | None = None
    """Subfolder of --tb-project-name for the TensorBoard events. Default: the run's name"""
    use_wandb: bool = False
    """Also log metrics to Weights & Biases"""
    log_multi_turn: bool = False
    """Log metrics of multi-turn samples"""
    log_passrate: bool = False
    """Log pass@k of the training groups"""
    log_correct_samples: bool = False
    """Also log means over the correct samples, as rollout/correct-<name>"""
    log_reward_category: str | None = None
    """Key of a dict reward by whose values samples are counted in metrics"""
    log_samples: str = flag("all", metavar="all|none|N", valid=log_samples_count)
    """Number of samples per rollout and evaluation data set whose texts are written to samples/ of
    the run
    """
    log_keep_last: int | None = flag(low=1)
    """Number of rollouts and evaluations whose texts and traces are kept. Default: all"""
    log_compress: bool = False
    """Compress the texts of samples as .jsonl.zst, which zstdcat reads"""


@dataclass
class DebugConfig(Section):
    _title = "debugging and profiling"

    debug_rollout_only: bool = False
    """Generate rollouts without a trainer"""
    debug_train_only: bool = False
    """Train without engines, on --load-debug-rollout-data or a rollout function without engines"""
    save_debug_rollout_data: str | None = path_flag(rollout_template)
    """File to which each rollout's samples are saved; {rollout_id} in the path is replaced by the
    rollout's number
    """
    load_debug_rollout_data: str | None = path_flag(rollout_template)
    """File of saved samples to train on, with {rollout_id} in the path; implies
    --debug-train-only
    """
    load_debug_rollout_data_subsample: float | None = flag(above=0, high=1)
    """Fraction of the samples of --load-debug-rollout-data to train on. Default: all"""
    load_forge_rollout_data: str | None = path_flag(rollout_template)
    """File of saved samples, with {rollout_id} in the path, that slime.rollout.forge_load replays
    while the engines are running"""
    save_debug_train_data: str | None = path_flag(rollout_template)
    """File to which each rollout's training batches are saved; {rollout_id} in the path is replaced
    by the rollout's number"""
    dump_details: str | None = path_flag()
    """Folder for --save-debug-rollout-data (rollout_data/), --save-debug-train-data (train_data/)
    and the tokenizer
    """
    record_memory_history: bool = False
    """Record the trainer's CUDA memory allocations in the first rollouts"""
    memory_snapshot_num_steps: int | None = flag(low=1)
    """Number of rollouts for which --record-memory-history records. Default: 1"""
    memory_snapshot_dir: str | None = path_flag()
    """Folder for the files of --record-memory-history. Default: traces/ of the run"""
    use_pytorch_profiler: bool = False
    """Write PyTorch profiler traces of the trainer to traces/ of the run"""
    profile_step_start: int = flag(1, low=0)
    """First rollout that --use-pytorch-profiler records"""
    profile_step_end: int = flag(2, low=0)
    """First rollout that --use-pytorch-profiler no longer records"""
    profile_target: list[Literal["train_overall", "train_actor", "train_log_probs"]] = flag(
        ["train_overall"]
    )
    """Parts of the trainer that --use-pytorch-profiler records: everything, the optimizer steps
    (train_actor), or the log-prob passes"""


def derive_debug_modes(debug: DebugConfig) -> None:
    if debug.load_debug_rollout_data:
        debug.debug_train_only = True
    if debug.dump_details:
        folder = Path(debug.dump_details)
        debug.fill(
            save_debug_rollout_data=str(folder / "rollout_data" / "{rollout_id}.pt"),
            save_debug_train_data=str(folder / "train_data" / "{rollout_id}.pt"),
        )


def chosen_trackers(observability: ObservabilityConfig) -> list[str]:
    """Return the trackers of a run: those of ``--tracker``, or those that the older switches
    choose.
    """
    if observability.tracker is not None:
        return list(dict.fromkeys(observability.tracker))
    return ["tensorboard"] * observability.use_tensorboard + ["wandb"] * observability.use_wandb
