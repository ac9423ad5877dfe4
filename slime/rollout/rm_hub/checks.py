"""What would make a reward fail at its first sample, told before a process starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime.data.eval_config import resolve_eval_datasets
from slime.rollout.rm_hub import model_rm
from slime.rollout.rm_hub.dispatch import load_reward

if TYPE_CHECKING:
    from slime.config.args import Args


def check_rewards(args: Args) -> list[str]:
    """One line for each reward model class that cannot be made.

    A function that cannot be imported is not told here: the check of the hooks has done so.
    """
    if args.loss_type == "sft_loss" or args.load_debug_rollout_data:
        return []
    problems = []
    for where, path in _rewards(args):
        if path:
            problems += _class_problem(where, path, args.rm_model_path)
    return list(dict.fromkeys(problems))


def _rewards(args: Args) -> Iterator[tuple[str, str | None]]:
    """(words before the problem, ``--custom-rm-path``) of training and of each evaluation set."""
    yield "", args.custom_rm_path
    try:
        datasets = resolve_eval_datasets(args)
    except (ValueError, TypeError, OSError):
        return  # told by the check of the data
    for config in datasets:
        yield f"evaluation set {config.name}: ", config.custom_rm_path


def _class_problem(where: str, path: str, model_path: str | None) -> list[str]:
    try:
        function = load_reward(path)
    except BaseException:
        return []
    if not model_rm.is_model_class(function):
        return [] if callable(function) else [f"{where}--custom-rm-path {path}: it is no function"]
    try:
        model_rm.check_class(function, model_path)
    except (TypeError, ValueError) as error:
        return [f"{where}--custom-rm-path {path}: {error}"]
    return []
