"""Checks of data, batches, rollout, reward and the two loops."""

from __future__ import annotations

from slime.config.args import FLAGS, Args
from slime.config.defaults import is_fully_async
from slime.config.flag import out_of_range
from slime.config.hf_config import is_hf_folder
from slime.config.layout import ParallelLayout

RM_TYPES = ("deepscaler", "dapo", "math", "f1", "gpqa", "ifbench", "last_number", "random", "remote_rm")


def check_ranges(args: Args) -> list[str]:
    """Ranges of values that were derived; those of the command line and of files are checked as they are read."""
    problems = []
    for name, flag in FLAGS.items():
        value = getattr(args, name)
        problem = out_of_range(flag, value) if flag.status != "refused" else None
        if problem:
            problems.append(f"{flag.option} {value}: {problem}")
    if args.rollout_temperature == 0:
        hint = "greedy sampling cannot explore; evaluate greedily with --eval-temperature 0"
        problems.append(f"--rollout-temperature 0: needs to be above 0 ({hint})")
    return problems


def check_batch(args: Args) -> list[str]:
    problems = []
    if args.over_sampling_batch_size < args.rollout_batch_size:
        problems.append(
            f"--over-sampling-batch-size {args.over_sampling_batch_size} is below --rollout-batch-size "
            f"{args.rollout_batch_size}: it must fetch at least one rollout"
        )
    if args.max_tokens_per_gpu is not None and not args.use_dynamic_batch_size:
        args.notices.append("--max-tokens-per-gpu has no effect without --use-dynamic-batch-size")
    if args.balance_by_flops and not args.use_dynamic_batch_size:
        problems.append("--balance-by-flops needs --use-dynamic-batch-size (--micro-batch-size turns it off)")
    if "num_rollout" in args.explicit and "num_epoch" in args.explicit:
        args.notices.append(f"--num-rollout {args.num_rollout} wins over --num-epoch {args.num_epoch}")
    return problems + _static_split(args) + _enough_samples(args)


def _static_split(args: Args) -> list[str]:
    """Fixed micro-batches must deal out evenly over the data-parallel ranks."""
    if args.use_dynamic_batch_size or not args.global_batch_size or args.debug_rollout_only:
        return []
    layout = ParallelLayout.from_args(args)
    unit = args.micro_batch_size * layout.dp * layout.vpp_group
    if args.num_steps_per_rollout is None or unit < 1 or args.global_batch_size % unit == 0:
        return []
    return [
        f"--global-batch-size {args.global_batch_size} does not split into --micro-batch-size "
        f"{args.micro_batch_size} x {layout.dp} data-parallel training ranks"
        + (f" x {layout.vpp_group} pipeline stages" if layout.vpp_group > 1 else "")
        + f" = {unit}: change one of them, or pass --use-dynamic-batch-size"
    ]


def _enough_samples(args: Args) -> list[str]:
    """Every rank needs a sample per step. Only a hook can make several samples of one rollout."""
    own_rollout = args.rollout_function_path != FLAGS["rollout_function_path"].default
    fans_out = args.custom_generate_function_path or own_rollout
    if not args.use_dynamic_batch_size or not args.global_batch_size or args.debug_rollout_only or fans_out:
        return []
    layout = ParallelLayout.from_args(args)
    if args.global_batch_size >= layout.dp * layout.vpp_group:
        return []
    return [
        f"--global-batch-size {args.global_batch_size} is less than one sample for each of {layout.dp} data-parallel "
        "training ranks"
        + (f" x {layout.vpp_group} pipeline stages" if layout.vpp_group > 1 else "")
        + ": use a larger batch or fewer ranks"
    ]


def check_rollout(args: Args) -> list[str]:
    problems = []
    if args.mask_offpolicy_in_partial_rollout and not (args.partial_rollout or is_fully_async(args)):
        problems.append(
            "--mask-offpolicy-in-partial-rollout needs --partial-rollout, or the fully asynchronous rollout"
        )
    if args.rollout_max_context_len is not None and args.rollout_max_context_len < 2:
        problems.append(
            f"--rollout-max-context-len {args.rollout_max_context_len}: leaves no room for a prompt and a response"
        )
    problems += _truncated_sampling(args)
    if (args.sglang_router_ip is None) != (args.sglang_router_port is None):
        problems.append("--sglang-router-ip and --sglang-router-port go together: give both or none")
    return problems


def _truncated_sampling(args: Args) -> list[str]:
    """Samples from a part of the vocabulary whose tokens training would score over all of it."""
    given = [f"--rollout-top-p {args.rollout_top_p}"] if args.rollout_top_p < 1 else []
    given += [f"--rollout-top-k {args.rollout_top_k}"] if args.rollout_top_k > 0 else []
    replayed = args.rollout_backend == "embedded" and args.train_backend == "fsdp"
    if not given or replayed or args.debug_rollout_only or args.loss_type == "sft_loss":
        return []
    what = (
        f"{' and '.join(given)} with --rollout-backend {args.rollout_backend} and --train-backend "
        f"{args.train_backend}: samples come from a part of the vocabulary, and training scores all of it, so "
        "importance ratios are wrong (only the embedded engine says which part, and only FSDP scores over it)"
    )
    if args.allow_truncated_sampling:
        args.notices.append(what)
        return []
    return [f"{what}: sample from the whole vocabulary, or pass --allow-truncated-sampling"]


def check_reward(args: Args) -> list[str]:
    problems = []
    if args.rm_type is not None:
        base = args.rm_type.removeprefix("boxed_")
        if base not in RM_TYPES:
            problems.append(
                f"--rm-type {args.rm_type}: not one of {', '.join(RM_TYPES)} (boxed_ may stand before each)"
            )
        if base == "remote_rm" and not args.rm_url:
            problems.append("--rm-type remote_rm needs --rm-url, the endpoint that scores")
    if args.rm_type is not None and args.custom_rm_path is not None:
        args.notices.append(f"--custom-rm-path {args.custom_rm_path} wins over --rm-type {args.rm_type}")
    return problems


def check_loop(args: Args, asynchronous: bool) -> list[str]:
    if asynchronous and args.colocate:
        return ["train_async.py needs GPUs of their own for the engines: drop --colocate, or use train.py"]
    if asynchronous:
        return [*_check_staleness(args), *_check_replay(args)]
    for name in ("async_buffer_size", "update_weights_interval", "max_weight_staleness", "replay_schedule"):
        if name in args.explicit and getattr(args, name) != FLAGS[name].default:
            args.notices.append(f"{FLAGS[name].option} is for train_async.py; train.py syncs after every rollout")
    if is_fully_async(args):
        return ["the fully asynchronous rollout generates while the trainer trains: start it with train_async.py"]
    return []


def _check_staleness(args: Args) -> list[str]:
    bound, interval = args.max_weight_staleness, args.update_weights_interval
    if bound is None:
        return []
    if bound < interval - 1:
        return [
            f"--max-weight-staleness {bound}: with --update-weights-interval {interval} the engines' weights alone are "
            f"up to {interval - 1} steps old: allow that, or update more often"
        ]
    larger = (args.over_sampling_batch_size or 0) > args.rollout_batch_size
    if (larger or args.partial_rollout) and not is_fully_async(args):
        return [
            "--max-weight-staleness bounds how much starts, and --over-sampling-batch-size or --partial-rollout keep "
            "what was started for later rollouts of any age: drop them, or take the fully asynchronous rollout "
            "(--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async)"
        ]
    return []


def _check_replay(args: Args) -> list[str]:
    if args.replay_schedule is None:
        return []
    problems = []
    if args.rollout_backend != "embedded" or not args.deterministic:
        problems.append(
            "--replay-schedule repeats a run exactly, which takes --rollout-backend embedded and --deterministic"
        )
    if args.load and not is_hf_folder(args.load):
        problems.append(f"--replay-schedule repeats a run from its beginning: drop --load {args.load}")
    return problems


ROLLOUT_RULES = (check_ranges, check_batch, check_rollout, check_reward)
