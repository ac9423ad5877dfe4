"""Rewards: what scores the samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.config.files import first_row
from slime.config.flag import flag
from slime.config.rollout import DEFAULT_ROLLOUT_FUNCTION, is_fully_async

if TYPE_CHECKING:
    from slime.config.args import Args

RM_TYPES = ("deepscaler", "dapo", "math", "f1", "gpqa", "ifbench", "last_number", "random", "remote_rm")


SFT_LIKE = ("sft_loss", "custom_loss")


@dataclass
class RewardConfig:
    _title = "reward"

    rm_type: str | None = flag(
        None,
        help="deepscaler, dapo, math, f1, gpqa, ifbench, last_number, random or remote_rm, each also with boxed_ in "
        "front; default: math where rows have a label",
    )
    custom_rm_path: str | None = flag(None, kind="hook", help="reward function")
    rm_model_path: str | None = flag(None, help="model of a class-style --custom-rm-path")
    rm_url: str | None = flag(None, help="endpoint of remote_rm")
    group_rm: bool = flag(False, help="score a whole group at once")
    reward_key: str | None = flag(None, help="entry of a dict reward that trains")
    eval_reward_key: str | None = flag(None, help="entry of a dict reward that evaluates")
    custom_reward_post_process_path: str | None = flag(None, kind="hook", help="raw rewards to trained rewards")
    reward_timeout: float = flag(30.0, above=0, help="seconds a verifier may take; then the sample is left out")
    reward_workers: int | None = flag(
        None,
        low=1,
        help="verifier processes; default: half of the cores of the machine that judges, at least two if it has two",
    )


def derive_reward(args: Args, row: dict[str, Any] | None) -> None:
    """Without a reward: ``math`` where rows have a label (decisions 1)."""
    if row is None or not needs_reward(args) or args.label_key is None or row.get(args.label_key) is None:
        return
    args.rm_type = "math"
    if args.custom_generate_function_path is None:
        args.notices.append(
            f"no --rm-type and no --custom-rm-path: rows have a {args.label_key!r}, so --rm-type math scores them"
        )


def needs_reward(args: Args) -> bool:
    """Whether samples need a score that no flag names."""
    own_rollout = args.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION and not is_fully_async(args)
    scored_elsewhere = args.loss_type in SFT_LIKE or own_rollout
    return not (args.rm_type or args.custom_rm_path or scored_elsewhere or args.debug_train_only)


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
