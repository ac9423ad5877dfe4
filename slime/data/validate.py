"""Everything that can be known to be wrong with the data before a process starts; without torch or a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slime.config.hooks import load_function
from slime.data.eval_config import BY_TYPE, resolve_eval_datasets
from slime.data.prompts import Report, RowKeys, parse_rows
from slime.data.rows import DataError, Problems, RowFile

LabelCheck = Callable[[str, Any, Mapping[str, Any]], str | None]
_LABEL_CHECK = "slime.rollout.rm_hub.check_label"  # by its path: this room imports no rollout code
_BUILT_IN_SOURCES = ("slime.rollout.data_source.", "slime.data.source.")
_ROWS_AT_ONCE = 1024
STREAMING_ROWS = 10_000  # of a file that is not read whole at the start
_SCORING_ROLLOUTS = ("slime.rollout.sglang_", "slime.rollout.fully_async_")


def check_data(args: Any, check_label: LabelCheck | None = None) -> list[str]:
    """Read all prompts (with ``--streaming-data`` the first of them) and evaluation sets, and check rows and labels.

    Args:
        args: with the names of the data, evaluation and reward flags.
        check_label: ``(rm_type, label, metadata) -> problem or None``; default: that of the rewards.

    Returns:
        One line per problem, with file and line; at most about twenty per file.
    """
    check = check_label or load_function(_LABEL_CHECK)
    found: list[str] = []
    if _reads_prompts(args):
        if args.prompt_data:
            keys, limit = RowKeys.of_args(args), STREAMING_ROWS if getattr(args, "streaming_data", False) else None
            found += _check_file(args.prompt_data, keys, _reward_type(args, args), check, strict=True, limit=limit)
        else:
            found.append("no prompts: give --prompt-data FILE, or --disable-rollout-global-dataset with your functions")
    try:
        datasets = resolve_eval_datasets(args)
    except (ValueError, TypeError, FileNotFoundError) as error:
        return [*found, str(error)]
    for config in datasets:
        problems = _check_file(config.path, config.row_keys(), _reward_type(args, config), check)
        found += [f"evaluation set {config.name}: {problem}" for problem in problems]
    return found


def _reads_prompts(args: Any) -> bool:
    """Whether the data source is a built-in one that will read ``--prompt-data``, or the user named a file anyway."""
    if getattr(args, "load_debug_rollout_data", None):
        return False
    if getattr(args, "debug_train_only", False):  # rollouts without engines, as SFT's
        return bool(args.prompt_data)
    source = getattr(args, "data_source_path", None) or _BUILT_IN_SOURCES[0]
    if not source.startswith(_BUILT_IN_SOURCES) or not getattr(args, "rollout_global_dataset", True):
        return bool(args.prompt_data)
    return True


def _reward_type(args: Any, settings: Any) -> str | None:
    """The reward type that labels must suit; "" where none is configured but one is needed; None where none is."""
    custom = getattr(settings, "custom_rm_path", None) not in (None, "", BY_TYPE)
    if getattr(args, "loss_type", "policy_loss") == "sft_loss" or custom:
        return None
    if settings.rm_type:
        return str(settings.rm_type)
    rollout = getattr(args, "rollout_function_path", None) or _SCORING_ROLLOUTS[0]
    users = getattr(settings, "custom_generate_function_path", None) or not rollout.startswith(_SCORING_ROLLOUTS)
    return None if users else ""  # the user's own generation may set rewards itself


def _check_file(
    spec: str,
    keys: RowKeys,
    rm_type: str | None,
    check_label: LabelCheck,
    strict: bool = False,
    limit: int | None = None,
) -> list[str]:
    """What is wrong with a file, read part by part.

    Args:
        strict: a column that was asked for and that no row has is a problem, optional or not.
        limit: look at so many rows at most.
    """
    problems, labels, report = Problems(), Problems(), Report(keys)
    labelled, first = False, None
    try:
        rows = RowFile(spec)
        count = len(rows) if limit is None else min(limit, len(rows))
        for begin in range(0, count, _ROWS_AT_ONCE):
            prompts, part = parse_rows(rows.read(range(begin, min(begin + _ROWS_AT_ONCE, count))), keys)
            report.merge(part)
            for row in prompts if rm_type is not None else ():
                first, labelled = first or row, labelled or row.label is not None
                problem = check_label(rm_type or "math", row.label, row.metadata)
                if problem:  # one that any label leaves as it is lies in the row's metadata: it is told by row, too
                    labelled = labelled or check_label(rm_type or "math", "0", row.metadata) == problem
                    labels.add(f"{row.where}: {problem}")
    except DataError as error:
        return error.problems
    report.tell(spec, problems)
    for warning in problems.warnings if strict else ():
        problems.add(warning)
    if labelled:
        problems.extend(labels)
    elif first is not None and labels.count:
        said = check_label(rm_type or "math", first.label, first.metadata)
        column = f"no row has a label (column {keys.label!r}, --label-key)"
        unset = "there is neither --rm-type nor --custom-rm-path, and " if not rm_type else ""
        problems.add(f"{spec}: {unset}{column}; {said}")
    return problems.lines()
