"""Metrics, dumps, profiles."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flag import flag

_NO_MTP = "multi-token prediction layers are not trained; leave it out"
_NO_SERVER = "there is no Megatron server; a teacher answers from SGLang (--opd-type sglang) or sits in the trainer"


@dataclass
class ObservabilityConfig:
    _title = "observability"

    use_tensorboard: bool = flag(True, kind="toggle", help="TensorBoard events in the run's folder")
    tb_project_name: str = flag(
        None,
        help="folder of TensorBoard events beside the run's own, with --tb-experiment-name",
    )
    tb_experiment_name: str = flag(None, help="last part of that folder's path; default: the run's name")
    use_wandb: bool = flag(False, help="log to Weights & Biases too")
    wandb_mode: str = flag(None, choices=("online", "offline", "disabled"), help="default: the environment's")
    wandb_dir: str = flag(None, help="folder of its files")
    wandb_key: str = flag(None, help="API key; `ps` shows it to everyone: better set WANDB_API_KEY")
    wandb_host: str = flag(None, help="server")
    wandb_team: str = flag(None, help="entity")
    wandb_group: str = flag(None, help="group")
    wandb_project: str = flag(None, help="project")
    wandb_run_id: str = flag(None, help="go on with this run")
    wandb_random_suffix: bool = flag(
        True,
        option="--disable-wandb-random-suffix",
        kind="negative",
        help="no random end to the group's name",
        status="notice",
        reason="names have no random end",
    )
    wandb_always_use_train_step: bool = flag(False, help="x-axis in optimizer steps")
    log_multi_turn: bool = flag(False, help="metrics of multi-turn samples")
    log_passrate: bool = flag(False, help="pass@k of the training groups")
    log_correct_samples: bool = flag(
        False,
        help="means over the correct samples apart, as rollout/correct-<name>",
    )
    log_reward_category: str = flag(None, help="entry of a dict reward to count by")


@dataclass
class DebugConfig:
    _title = "debugging and profiling"

    debug_rollout_only: bool = flag(False, help="no trainer")
    debug_train_only: bool = flag(
        False, help="no engines; needs --load-debug-rollout-data or a rollout function that asks none, such as SFT's"
    )
    save_debug_rollout_data: str = flag(None, help="template of a dump of each rollout, with {rollout_id}")
    load_debug_rollout_data: str = flag(None, help="train on such dumps; implies --debug-train-only")
    load_debug_rollout_data_subsample: float = flag(None, above=0, high=1, help="share of the dump to use")
    load_forge_rollout_data: str = flag(
        None,
        help="template of dumps that slime.rollout.forge_load replays with engines alive",
    )
    save_debug_train_data: str = flag(
        None,
        help="template of a dump of each rollout's train batches, with {rollout_id}",
    )
    dump_details: str = flag(
        None,
        help="folder; sets both dumps to rollout_data/ and train_data/ in it and keeps the tokenizer",
    )
    record_memory_history: bool = flag(False, help="record CUDA allocations of the trainer's first rollouts")
    memory_snapshot_num_steps: int = flag(None, low=1, help="rollouts that are recorded; default 1")
    memory_snapshot_dir: str = flag(None, help="folder of the record; default: traces/ of the run")
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
    ci_test: bool = flag(
        False, help="assertions for CI", status="refused", reason="tests hold them here, the product carries none"
    )
    ci_disable_kl_checker: bool = flag(
        False, help="part of --ci-test", status="refused", reason="there is no --ci-test"
    )
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1, low=0, help="part of --ci-test", status="refused", reason="the gap is in the metrics of each step"
    )
    ci_save_grad_norm: str = flag(
        None, help="part of --ci-test", status="refused", reason="gradient norms are in metrics.jsonl"
    )
    ci_load_grad_norm: str = flag(
        None, help="part of --ci-test", status="refused", reason="gradient norms are in metrics.jsonl"
    )


@dataclass
class MegatronExtrasConfig:
    _title = "Megatron extras and teacher server"

    mtp_num_layers: int = flag(None, help="multi-token prediction layers", status="refused", reason=_NO_MTP)
    mtp_loss_scaling_factor: float = flag(0.2, help="weight of their loss", status="refused", reason=_NO_MTP)
    enable_mtp_training: bool = flag(False, help="train them", status="refused", reason=_NO_MTP)
    custom_megatron_init_path: str = flag(None, kind="hook", help="called once Megatron's groups exist: fn(args)")
    custom_megatron_before_log_prob_hook_path: str = flag(
        None, kind="hook", help='called before log-probs: fn(args, model, prefix), prefix "", "ref_" or "teacher_"'
    )
    custom_megatron_before_train_step_hook_path: str = flag(
        None,
        kind="hook",
        help="called before a step: fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)",
    )
    megatron_deepgemm_forward_layers: list[int] | None = flag(
        None, help="layers in FP8 DeepGEMM", status="refused", reason="there are no DeepGEMM kernels here"
    )
    megatron_deepgemm_forward_modules: list[str] | None = flag(
        None, help="modules in FP8 DeepGEMM", status="refused", reason="there are no DeepGEMM kernels here"
    )
    megatron_deepgemm_moe_forward_layers: list[int] | None = flag(
        None, help="MoE layers in FP8 DeepGEMM", status="refused", reason="there are no DeepGEMM kernels here"
    )
    megatron_deepgemm_moe_forward_modules: list[str] | None = flag(
        None, help="MoE modules in FP8 DeepGEMM", status="refused", reason="there are no DeepGEMM kernels here"
    )
    teacher_port: int = flag(7999, help="port of a Megatron teacher server", status="refused", reason=_NO_SERVER)
    teacher_warmup_port: int = flag(7999, help="its warm-up port", status="refused", reason=_NO_SERVER)
    teacher_warmup_timeout_s: int = flag(3000, help="its warm-up deadline", status="refused", reason=_NO_SERVER)
    teacher_sample_reduction_chunk_size: int = flag(
        4096, help="its chunk of samples", status="refused", reason=_NO_SERVER
    )
    teacher_label_reduction_chunk_size: int = flag(
        4096, help="its chunk of labels", status="refused", reason=_NO_SERVER
    )
    megatron_server_max_length: int = flag(0, help="its longest sequence", status="refused", reason=_NO_SERVER)
    megatron_server_update_timeout_s: int = flag(
        3600, help="its deadline of a weight update", status="refused", reason=_NO_SERVER
    )
    megatron_server_warmup: bool = flag(True, kind="toggle", help="warm it up", status="refused", reason=_NO_SERVER)
