"""Interface that slime does not support, with the reasons: flags that are refused or have no effect, flags that were
removed or belong to other frameworks, and environment variables that slime does not read."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.flag import Flag, Kind, Status, flag, flags_of, shown

if TYPE_CHECKING:
    from slime.config.args import Args

_NO_BUFFER = "slime has no buffer server; implement the exchange in --rollout-function-path or --data-source-path"
_NO_MTP = "multi-token prediction layers are not trained; --save-hf contains those of --hf-checkpoint unchanged"
_NO_SERVER = "slime has no Megatron server; the teacher runs in SGLang or in the trainer (--opd-type)"
_NO_DSA = "indexers of DSA models get no gradient with FSDP, so they are always frozen"
_NO_DEEPGEMM = "slime has no DeepGEMM kernels"
_NO_CI = "slime has no assertions for CI in the training loop; the numbers are in metrics.jsonl of the run"


def refused(default: object, help: str, reason: str, *, kind: Kind | None = None, choices: tuple[str, ...] = ()) -> Any:
    """Declare a flag that is refused, with the reason, unless it has its default value."""
    return flag(default, help=help, status="refused", reason=reason, kind=kind, choices=choices)


def ignored(default: object, help: str, reason: str, *, kind: Kind | None = None, option: str | None = None) -> Any:
    """Declare a flag that is accepted with a notice that it has no effect. If it is a number, it is a count, a size, a
    time or a factor, and never below 0."""
    return flag(default, help=help, status="notice", reason=reason, kind=kind, option=option, low=0)


@dataclass
class UnsupportedConfig:
    """The flags of the original interface that slime refuses or ignores. They remain attributes of Args."""

    _title = "not supported"

    config: str | None = refused(None, "YAML file of default values", "use --override FILE", kind="path")
    custom_model_provider_path: str | None = refused(
        None,
        "Function that builds Megatron's model",
        "a model also needs a weight map: add a model family to slime/weights/maps",
        kind="hook",
    )
    qwen_gdn_backend: str = refused(
        "fla", "Kernels of gated delta networks", "slime has no such kernels yet", choices=("fla", "flashqla")
    )
    freeze_indexer: bool = ignored(False, "Freeze the indexers of DSA models", _NO_DSA)
    allgather_cp: bool = refused(False, "Use the contiguous layout of context parallelism", "it is for DSA models only")
    release_train: bool = refused(
        False,
        "End the training processes during a rollout",
        "use --offload-train, which frees the GPU memory without loading the model again",
    )
    rollout_task_type: str = refused("math", "Task of an external rollout buffer", _NO_BUFFER)
    rollout_buffer_url: str | None = refused(None, "URL of an external rollout buffer", _NO_BUFFER)
    fetch_trajectory_retry_times: int = refused(-1, "Number of attempts to fetch from a rollout buffer", _NO_BUFFER)
    ci_test: bool = refused(False, "Enable assertions for CI in the training loop", _NO_CI)
    ci_disable_kl_checker: bool = refused(False, "Disable the KL assertion of --ci-test", _NO_CI)
    ci_train_rollout_logprob_abs_diff_threshold: float = refused(
        0.1, "Maximum difference between the log-probs of trainer and engine with --ci-test", _NO_CI
    )
    ci_save_grad_norm: str | None = refused(None, "File to which --ci-test writes gradient norms", _NO_CI)
    ci_load_grad_norm: str | None = refused(None, "File with which --ci-test compares gradient norms", _NO_CI)
    mtp_num_layers: int | None = ignored(None, "Number of multi-token prediction layers", _NO_MTP)
    mtp_loss_scaling_factor: float = ignored(0.2, "Coefficient of the multi-token prediction loss", _NO_MTP)
    enable_mtp_training: bool = ignored(False, "Train the multi-token prediction layers", _NO_MTP)
    megatron_deepgemm_forward_layers: list[int] | None = refused(None, "Layers that run in FP8 DeepGEMM", _NO_DEEPGEMM)
    megatron_deepgemm_forward_modules: list[str] | None = refused(
        None, "Modules that run in FP8 DeepGEMM", _NO_DEEPGEMM
    )
    megatron_deepgemm_moe_forward_layers: list[int] | None = refused(None, "MoE layers in FP8 DeepGEMM", _NO_DEEPGEMM)
    megatron_deepgemm_moe_forward_modules: list[str] | None = refused(None, "MoE modules in FP8 DeepGEMM", _NO_DEEPGEMM)
    teacher_port: int = refused(7999, "Port of a Megatron teacher server", _NO_SERVER)
    teacher_warmup_port: int = refused(7999, "Warm-up port of a Megatron teacher server", _NO_SERVER)
    teacher_warmup_timeout_s: int = refused(
        3000, "Warm-up deadline of a Megatron teacher server in seconds", _NO_SERVER
    )
    teacher_sample_reduction_chunk_size: int = refused(
        4096, "Samples per chunk of a Megatron teacher server", _NO_SERVER
    )
    teacher_label_reduction_chunk_size: int = refused(4096, "Labels per chunk of a Megatron teacher server", _NO_SERVER)
    megatron_server_max_length: int = refused(0, "Maximum sequence length of a Megatron server in tokens", _NO_SERVER)
    megatron_server_update_timeout_s: int = refused(
        3600, "Deadline in seconds for a weight update of a Megatron server", _NO_SERVER
    )
    megatron_server_warmup: bool = refused(True, "Warm up a Megatron server", _NO_SERVER, kind="toggle")
    num_gpus_per_node: int | None = ignored(None, "Number of GPUs per node", "Ray reports the GPUs of each node")
    distributed_backend: str | None = ignored(
        None, "Backend of torch.distributed", "it is nccl on CUDA and gloo on the CPU"
    )
    megatron_to_hf_mode: str = ignored(
        "raw", "Way in which Megatron's weights get their Hugging Face names", "there is only one way, which is exact"
    )
    qkv_format: str = ignored("thd", "Layout of the trainer's sequences", "sequences are always packed")
    enable_weights_backuper: bool = ignored(
        True,
        "Do not keep copies of the weights in CPU memory",
        "copies of the weights are kept only if another flag needs them",
        option="--disable-weights-backuper",
        kind="negative",
    )
    train_memory_margin_bytes: int = ignored(
        1 << 30, "GPU memory that training leaves free", "lower --max-tokens-per-gpu instead"
    )
    use_slime_router: bool = ignored(False, "Use a router of slime's own", "sglang-router is the only router")
    slime_router_max_connections: int | None = ignored(
        None, "Connections of slime's own router", "use --sglang-server-concurrency"
    )
    slime_router_timeout: float | None = ignored(
        None, "Deadline of slime's own router", "use --sglang-router-request-timeout-secs"
    )
    slime_router_health_check_failure_threshold: int = ignored(
        3, "Failed checks after which slime's own router drops an engine", "use --use-fault-tolerance"
    )
    use_http2: bool = ignored(False, "Send requests by HTTP/2", "slime uses HTTP/1.1 with a connection pool")
    use_distributed_post: bool = ignored(
        False, "Send HTTP requests from one Ray actor per node", "use --rollout-workers"
    )
    http_proxy: str | None = ignored(None, "HTTP proxy for requests to engines", "slime connects to engines directly")
    recompute_loss_function: bool = ignored(
        False,
        "Recompute logits in the backward pass",
        "logits are always recomputed; those of a whole batch are never kept",
    )
    fsdp_state_dict_cpu_offload: bool = ignored(
        True, "Gather FSDP state dicts in CPU memory", "checkpoints are always written from CPU memory", kind="toggle"
    )
    fsdp_cpu_backend: str = ignored("gloo", "Backend of FSDP's collective operations on the CPU", "it is always gloo")
    update_weight_local_checkpoint_dir: str | None = ignored(
        None,
        "Folder on each host in which weight deltas are applied",
        "each engine keeps the weights that deltas change in memory and needs no folder",
    )
    min_batch_collection_ratio: float = ignored(
        1.0, "Fraction of a batch for which a rollout waits", "a rollout always collects the whole batch"
    )
    wandb_random_suffix: bool = ignored(
        True,
        "Do not append a random suffix to the group name in Weights & Biases",
        "names have no random suffix",
        option="--disable-wandb-random-suffix",
        kind="negative",
    )


def state_of(flag: Flag, value: object) -> tuple[Status, str]:
    """Return the status of a flag at a value, and the reason. The default of a flag always works."""
    if value == flag.default or value is None:
        return "works", ""
    if isinstance(value, Hashable) and value in flag.limits:
        return flag.limits[value]
    return flag.status, flag.reason


def check_states(args: Args) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the problems of refused flags that the user set, and each flag without effect with the reason."""
    problems: list[str] = []
    idle: list[tuple[str, str]] = []
    for name, entry in flags_of(type(args)).items():
        if name not in args.explicit:
            continue
        value = getattr(args, name)
        status, reason = state_of(entry, value)
        words = value if isinstance(value, str) else shown(value)
        typed = entry.option if entry.is_bool or entry.takes_list else f"{entry.option} {words}"
        if status == "notice":
            idle.append((typed, reason))
        elif status == "refused":
            problems.append(f"{typed} is not supported: {reason}")
    return problems, idle


def no_effect_notice(idle: Sequence[tuple[str, str]]) -> list[str]:
    """Return one notice for all flags without effect, or none. Each has the words of the flag and the reason."""
    if len(idle) < 2:
        return [f"{typed} has no effect: {reason}" for typed, reason in idle]
    return ["these flags have no effect:" + "".join(f"\n  {typed}: {reason}" for typed, reason in idle)]


def other_defaults(args: Args) -> list[str]:
    """Return a notice that names the defaults in use that are others than those of slime 0.3, if MODEL_ARGS were given:
    then the flags are probably those of a launch script that was written for it."""
    if "num_layers" not in args.megatron:
        return []
    flags = flags_of(type(args))
    different = [
        f"{flags[name].option} {getattr(args, name)} (was {'not limited' if value is None else value})"
        for name, value in ORIGINAL_DEFAULTS.items()
        if name not in args.explicit and getattr(args, name) != value and _is_used(args, name)
    ]
    return [f"defaults that are not those of slime 0.3: {', '.join(different)}"] if different else []


def _is_used(args: Args, name: str) -> bool:
    if name == "kl_loss_type":
        return args.use_kl_loss or args.kl_coef != 0
    return name != "rollout_max_response_len" or not args.debug_train_only


_MISSING = json.loads((Path(__file__).parent / "tables" / "missing.json").read_text(encoding="utf-8"))
GONE: dict[str, str] = _MISSING["gone"]
"""Flags of older releases, and what to use instead."""
OTHER_FRAMEWORKS: dict[str, str] = _MISSING["other_frameworks"]
"""Prefixes of flags of other frameworks, and why slime has no such flag."""
ORIGINAL_DEFAULTS: dict[str, object] = _MISSING["original_defaults"]
"""Defaults of slime 0.3 that change results and are not those of this version, by attribute."""
UNREAD_VARIABLES: dict[str, str] = _MISSING["variables"]
"""Environment variables of older releases that have no effect, and why."""


def why_missing(option: str) -> str | None:
    """Explain why a flag does not exist; None if it was never removed and is not known from another framework.

    Args:
        option: The flag with its ``--``; ``_`` and ``-`` are equivalent.
    """
    option = option.replace("_", "-")
    if option in GONE:
        return f"was removed: {GONE[option]}"
    reason = next((reason for start, reason in OTHER_FRAMEWORKS.items() if option.startswith(start)), None)
    return f"does not exist: {reason}" if reason else None


def unread_variables(environment: Mapping[str, str]) -> list[str]:
    """Describe each environment variable that is set but that slime does not read."""
    found = []
    for name in sorted(environment):
        of_prefix = (reason for prefix, reason in _MISSING["variable_prefixes"].items() if name.startswith(prefix))
        reason = UNREAD_VARIABLES.get(name) or next(of_prefix, None)
        if reason:
            found.append(f"environment variable {name} has no effect: {reason}")
    return found
