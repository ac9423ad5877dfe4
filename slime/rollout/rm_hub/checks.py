"""Checks of the reward configuration before any process starts, for errors that would appear at the first sample."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from slime.data.eval_config import resolve_eval_datasets
from slime.rollout.rm_hub import model_rm
from slime.rollout.rm_hub.dispatch import load_reward
from slime.rollout.rm_hub.reward import reward_of

if TYPE_CHECKING:
    from slime.config.args import Args


def check_rewards(args: Args) -> list[str]:
    """Return one line for each reward that cannot be used.

    A function that cannot be imported is not reported here, because the check of the hooks reports it.
    """
    if args.loss_type == "sft_loss" or args.load_debug_rollout_data:
        return []
    rewards = [("", args.custom_rm_path)]
    with contextlib.suppress(ValueError, TypeError, OSError):  # the check of the data reports these
        rewards += [(f"evaluation set {one.name}: ", one.custom_rm_path) for one in resolve_eval_datasets(args)]
    problems = [line for where, path in rewards if path for line in _class_problem(where, path, args.rm_model_path)]
    reward = None if args.custom_rm_path else reward_of(args.rm_type or "")
    if reward is not None and reward.check is not None:
        problems += reward.check(args)
    return list(dict.fromkeys(problems))


def _class_problem(where: str, path: str, model_path: str | None) -> list[str]:
    try:
        function = load_reward(path)
    except BaseException:
        return []
    if not model_rm.is_model_class(function):
        return [] if callable(function) else [f"{where}--custom-rm-path {path}: it is not a function"]
    try:
        model_rm.check_class(function, model_path)
    except (TypeError, ValueError) as error:
        return [f"{where}--custom-rm-path {path}: {error}"]
    return []
