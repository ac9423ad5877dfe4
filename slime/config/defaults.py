"""What a flag is when it was not given: derived from other flags, the machine and the first row of the data.

Everything here writes to ``args`` and explains choices that a user could miss in ``args.notices``.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime.config.args import FLAGS, Args
from slime.config.context import context_limit, context_notice
from slime.config.data_peek import first_row
from slime.config.hf_config import is_hf_folder, read_config
from slime.config.machine import Machine, installed, this_machine
from slime.config.rollout import staleness_bound
from slime.config.server_groups import ServerGroupError, read_server_groups, total_gpus

SFT_LIKE = ("sft_loss", "custom_loss")
AGENT_GENERATE = "slime.agent.rollout.generate"
MIN_TOKEN_BUDGET = 4096
"""Tokens of a micro-batch that every machine is expected to train."""
DEFAULT_ROLLOUT_FUNCTION = FLAGS["rollout_function_path"].default
FULLY_ASYNC_FUNCTION = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"


def resolve_defaults(args: Args, *, asynchronous: bool = False, machine: Machine | None = None) -> list[str]:
    """Fill in everything that is still None and has a derived default. Returns problems."""
    machine = machine or this_machine()
    problems: list[str] = []
    _backends(args, machine)
    _model(args, machine)
    _debug_modes(args)
    problems += _agent(args)
    _data(args)
    problems += _batch(args)
    _algorithm(args, asynchronous)
    _resources(args, machine, asynchronous)
    _evaluation(args)
    _checkpoints(args)
    _run_folder(args)
    return problems


def default_args(**values: Any) -> Args:
    """Resolved but unchecked Args, for tests and tools: ``default_args(rollout_batch_size=4)``.

    Raises:
        TypeError: a name that is no field of Args and no pass-through flag.
    """
    args = Args()
    for name, value in values.items():
        if not hasattr(args, name):
            raise TypeError(f"args has no {name!r}")
        setattr(args, name, value)
    args.explicit = frozenset(values)
    resolve_defaults(args)
    return args


def _is_built(flag: str, value: str) -> bool:
    return value not in FLAGS[flag].limits


def _backends(args: Args, machine: Machine) -> None:
    if args.train_backend is None:
        megatron = machine.cuda and _is_built("train_backend", "megatron") and installed("megatron.core")
        args.train_backend = "megatron" if megatron else "fsdp"
    if args.rollout_backend is None:
        sglang = machine.cuda and _is_built("rollout_backend", "sglang") and installed("sglang")
        args.rollout_backend = "sglang" if sglang else "embedded"
    if args.embedded_device is None:
        args.embedded_device = "cuda" if machine.cuda else "cpu"
    if args.reward_workers is None:
        args.reward_workers = min(machine.cores, 8)


def _model(args: Args, machine: Machine) -> None:
    if args.hf_checkpoint is None:
        for name in ("ref_load", "load"):
            if is_hf_folder(getattr(args, name)):
                args.hf_checkpoint = getattr(args, name)
                args.notices.append(
                    f"--hf-checkpoint is not given: --{name.replace('_', '-')} {args.hf_checkpoint} is used"
                )
                break
    if args.ref_load is None:
        args.ref_load = args.hf_checkpoint
    if args.deterministic is None:
        # On the CPU it costs 2-3% of a decode step at 8 running requests and more (17% at one alone). A rollout that
        # goes on with aborted samples is a matter of timing by its nature.
        on_cpu = args.embedded_device == "cpu" and args.rollout_backend == "embedded" and not machine.cuda
        args.deterministic = args.deterministic_mode or (on_cpu and not args.partial_rollout)
    if args.bf16 and args.train_dtype is None:
        args.train_dtype = "bfloat16"
    if args.train_dtype is None:
        args.train_dtype = "bfloat16" if machine.cuda else "float32"
    if args.compile_layers is None:
        args.compile_layers = machine.cuda and installed("triton")
    if args.rollout_dtype is None:
        args.rollout_dtype = args.train_dtype
    if args.megatron.get("recompute_activations") or args.megatron.get("recompute_granularity"):
        args.gradient_checkpointing = True
    if args.lr_warmup_fraction is None:
        args.lr_warmup_fraction = args.warmup_ratio
    if args.critic_lr is None:
        args.critic_lr = args.lr
    if args.critic_lr_warmup_iters is None:
        args.critic_lr_warmup_iters = args.lr_warmup_iters


def _debug_modes(args: Args) -> None:
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


def _agent(args: Args) -> list[str]:
    """An agent program is run by the generate function for agents."""
    if not args.agent_function_path and not args.agent_command:
        if args.custom_generate_function_path == AGENT_GENERATE:
            return [f"{AGENT_GENERATE} runs an agent program: give --agent-function-path or --agent-command"]
        return []
    if args.custom_generate_function_path is None:
        args.custom_generate_function_path = AGENT_GENERATE
    problems = [] if args.agent_timeout > 0 else [f"--agent-timeout {args.agent_timeout}: must be above 0"]
    if args.agent_function_path and args.agent_command:
        problems.append("--agent-function-path and --agent-command both name the agent program: give one")
    return problems


def _data(args: Args) -> None:
    row = first_row(args.prompt_data) if args.prompt_data and args.rollout_global_dataset else None
    if row is not None:
        if "input_key" not in args.explicit and args.input_key not in row and "input" in row:
            args.input_key = "input"
            args.notices.append("rows have no 'prompt' but an 'input': it is used (--input-key)")
        if "label_key" not in args.explicit and args.label_key not in row:
            args.label_key = None  # type: ignore[assignment]
    if args.rollout_max_prompt_len is None and args.rollout_max_context_len is not None:
        args.rollout_max_prompt_len = args.rollout_max_context_len - 1
    if not args.debug_train_only and (notice := context_notice(args)) is not None:
        args.notices.append(notice)
    if args.over_sampling_batch_size is None:
        args.over_sampling_batch_size = args.rollout_batch_size
    _reward(args, row)


def _reward(args: Args, row: dict[str, Any] | None) -> None:
    """Without a reward: ``math`` where rows have a label (decisions 1)."""
    if row is None or not needs_reward(args) or args.label_key is None or row.get(args.label_key) is None:
        return
    args.rm_type = "math"
    if args.custom_generate_function_path is None:
        args.notices.append(
            f"no --rm-type and no --custom-rm-path: rows have a {args.label_key!r}, so --rm-type math scores them"
        )


def is_fully_async(args: Args) -> bool:
    return args.rollout_function_path.replace(":", ".") == FULLY_ASYNC_FUNCTION


def needs_reward(args: Args) -> bool:
    """Whether samples need a score that no flag names."""
    own_rollout = args.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION and not is_fully_async(args)
    scored_elsewhere = args.loss_type in SFT_LIKE or own_rollout
    return not (args.rm_type or args.custom_rm_path or scored_elsewhere or args.debug_train_only)


def _batch(args: Args) -> list[str]:
    """rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout."""
    if args.loss_type == "sft_loss" and "n_samples_per_prompt" not in args.explicit:
        args.n_samples_per_prompt = 1  # nothing is sampled: copies of a conversation teach nothing new
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    given = (
        f"--rollout-batch-size {args.rollout_batch_size} x "
        f"--n-samples-per-prompt {args.n_samples_per_prompt} = {samples}"
    )
    _micro_batches(args)
    if min(args.rollout_batch_size, args.n_samples_per_prompt) < 1:
        return []
    if args.global_batch_size is None:
        steps = args.num_steps_per_rollout or 1
        if samples % max(steps, 1):
            return [f"{given} samples cannot be split into --num-steps-per-rollout {steps} equal steps"]
        args.num_steps_per_rollout = steps
        args.global_batch_size = samples // max(steps, 1)
        return []
    if args.global_batch_size < 1:
        return []
    steps = args.num_steps_per_rollout
    if steps is None and samples % args.global_batch_size == 0:
        args.num_steps_per_rollout = samples // args.global_batch_size
        return []
    if steps is None:
        fits = [n for n in range(1, samples + 1) if samples % n == 0]
        near = min(fits, key=lambda n: (abs(n - args.global_batch_size), -n))
        return [f"{given}, which is no multiple of --global-batch-size {args.global_batch_size}: {near} would fit"]
    if samples != args.global_batch_size * steps:
        wanted = args.global_batch_size * steps
        return [
            f"{given}, but --global-batch-size {args.global_batch_size} x --num-steps-per-rollout {steps} = {wanted}: "
            "leave one of the last two out, and it follows"
        ]
    return []


def _micro_batches(args: Args) -> None:
    """Micro-batches by tokens, unless the user counts them in samples.

    The budget follows from flags alone, so that a resumed run packs as before. Its default needs no more memory than
    the longest sample alone, which has to fit in any case.
    """
    if args.use_dynamic_batch_size is None:
        padded = args.attn_implementation not in (None, "varlen")
        args.use_dynamic_batch_size = "micro_batch_size" not in args.explicit and not padded
    if args.balance_data is None:
        args.balance_data = args.use_dynamic_batch_size or args.balance_by_flops
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        longest = args.rollout_max_response_len + (args.rollout_max_prompt_len or 0)
        if (limit := context_limit(args)) is not None:
            longest = min(longest, limit)
        context_parallel = max(int(args.megatron.get("context_parallel_size") or 1), 1)
        args.max_tokens_per_gpu = max(MIN_TOKEN_BUDGET, math.ceil(longest / context_parallel))


def _algorithm(args: Args, asynchronous: bool) -> None:
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    if args.n_samples_per_prompt == 1:
        args.grpo_std_normalization = False
    args.use_critic = args.advantage_estimator == "ppo"
    if args.kl_loss_type is None:
        args.kl_loss_type = "k1" if args.kl_coef != 0 else "low_var_kl"
    if args.use_rollout_routing_replay:
        args.use_routing_replay = True
    if args.use_tis is None:
        _correct_by_default(args, asynchronous)


def _correct_by_default(args: Args, asynchronous: bool) -> None:
    """Where samples are older than the weights they train, the loss is weighed, unless the user chose otherwise."""
    chosen = args.use_rollout_logprobs or args.custom_tis_function_path or args.get_mismatch_metrics
    bound = staleness_bound(args.async_buffer_size, args.update_weights_interval, args.max_weight_staleness)
    args.use_tis = asynchronous and bound > 0 and args.loss_type == "policy_loss" and not chosen
    if args.use_tis:
        args.notices.append(
            f"--use-tis is on: tokens may be {bound} step(s) older than the weights that they train (off: --no-use-tis)"
        )


def _resources(args: Args, machine: Machine, asynchronous: bool) -> None:
    _default_placement(args, machine, asynchronous)
    if args.max_restarts is None:
        args.max_restarts = 3 if args.use_fault_tolerance else 0
    train = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.rollout_num_gpus is None and args.sglang_config:
        with contextlib.suppress(ServerGroupError, OSError):  # the checks tell what is wrong with it
            groups = read_server_groups(args.sglang_config, str(args.hf_checkpoint), args.rollout_num_gpus_per_engine)
            args.rollout_num_gpus = total_gpus(groups)
    if args.rollout_num_gpus is None:
        args.rollout_num_gpus = train if args.colocate else args.rollout_num_gpus_per_engine
    args.world_size = train
    if args.check_weight_update_equal is None:
        args.check_weight_update_equal = _checks_first_update(args)
    shared = args.colocate and not args.debug_rollout_only
    for name in ("offload_train", "offload_rollout"):
        if getattr(args, name) is None:
            setattr(args, name, bool(shared or args.offload))
    if args.use_critic and shared:
        args.offload_train = True


def _checks_first_update(args: Args) -> bool:
    """Whether one more update shows cheaply that every tensor of an engine is written: not through files, and not where
    an engine holds tensors that nobody sends (a draft model, a vision tower) or holds them quantised."""
    if not args.audit_weights or args.rollout_backend != "sglang" or args.update_weight_transport != "nccl":
        return False
    if args.rollout_external_engine_addrs or args.sglang.get("quantization"):
        return False
    config = read_config(str(args.hf_checkpoint)) or {}
    other = any(key in config for key in ("vision_config", "audio_config", "quantization_config"))
    return not other and not args.sglang.get("speculative_algorithm")


def _default_placement(args: Args, machine: Machine, asynchronous: bool) -> None:
    """Neither trainer nor engines were given GPUs: share what is here, or split it where sharing is not possible."""
    if args.actor_num_gpus_per_node is not None:
        return
    if not machine.cuda:
        args.actor_num_gpus_per_node = 1
        return
    if args.colocate or args.debug_train_only or args.debug_rollout_only:
        args.actor_num_gpus_per_node = machine.gpus
        return
    if args.rollout_num_gpus is not None:
        args.actor_num_gpus_per_node = max(machine.gpus - args.rollout_num_gpus, 1)
        return
    if asynchronous and machine.gpus > 1:
        args.actor_num_gpus_per_node = machine.gpus // 2
        args.rollout_num_gpus = machine.gpus - machine.gpus // 2
        args.notices.append(
            f"{args.actor_num_gpus_per_node} GPUs train and {args.rollout_num_gpus} generate "
            "(--actor-num-gpus-per-node, --rollout-num-gpus)"
        )
        return
    args.actor_num_gpus_per_node = machine.gpus
    if not asynchronous:
        args.colocate = True
        args.notices.append(
            f"no placement is given: trainer and engines share {machine.gpus} GPU(s), as with --colocate"
        )


def _evaluation(args: Args) -> None:
    if args.eval_function_path is None and is_fully_async(args):
        args.eval_function_path = str(DEFAULT_ROLLOUT_FUNCTION)  # the pool does not evaluate
    fallbacks: dict[str, str] = {
        "eval_function_path": "rollout_function_path",
        "eval_input_key": "input_key",
        "eval_label_key": "label_key",
        "eval_tool_key": "tool_key",
        "eval_reward_key": "reward_key",
        "eval_temperature": "rollout_temperature",
        "eval_top_p": "rollout_top_p",
        "eval_top_k": "rollout_top_k",
        "eval_max_response_len": "rollout_max_response_len",
        "eval_max_prompt_len": "rollout_max_prompt_len",
        "eval_max_context_len": "rollout_max_context_len",
    }
    for name, source in fallbacks.items():
        if getattr(args, name) is None:
            setattr(args, name, getattr(args, source))
    if args.eval_interval and not args.eval_prompt_data and not args.eval_config:
        args.notices.append(
            f"--eval-interval {args.eval_interval} evaluates nothing: give --eval-prompt-data NAME PATH"
        )
        args.eval_interval = None  # type: ignore[assignment]


def _checkpoints(args: Args) -> None:
    if args.finetune:
        args.no_load_optim = args.no_load_rng = True
    if args.save_retain_interval and args.save_keep_last is None:
        args.save_keep_last = 1


def _run_folder(args: Args, now: Callable[[], str] = lambda: time.strftime("%Y%m%d-%H%M%S")) -> None:
    if args.run_name is None:
        resumed = _resumed_run(args)
        model = re.sub(r"[^\w.-]+", "-", Path(args.hf_checkpoint).name) if args.hf_checkpoint else "run"
        kind = args.advantage_estimator if args.loss_type == "policy_loss" else args.loss_type
        args.run_name = resumed or f"{model}-{kind}-{now()}"
    if args.save_interval and args.save is None:
        args.save = str(Path(args.output_dir) / args.run_name / "checkpoints")
        args.notices.append(f"--save is not given: snapshots go to {args.save}")


def _resumed_run(args: Args) -> str | None:
    """Name of the run whose ``outputs/<run>/checkpoints`` is loaded, so that it goes on in its own folder."""
    if args.load is None or args.finetune:
        return None
    load, outputs = Path(args.load).resolve(), Path(args.output_dir).resolve()
    inside = load.name == "checkpoints" and load.parent.parent == outputs and load.is_dir()
    return load.parent.name if inside else None
