"""Checks of the data before any process starts. A tokenizer is loaded where rows are rendered with
its template.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.data import check_multimodal_keys, reward_type_problem
from slime.config.flag import shown
from slime.config.hf_config import read_chat_template
from slime.config.hooks import hook_problem
from slime.config.named_data import data_name
from slime.config.rollout import (
    DEFAULT_ROLLOUT_FUNCTION,
    OWN_FUNCTIONS,
    SFT_FUNCTION,
    is_fully_async,
)
from slime.data.dataset import PromptMaker
from slime.data.eval_config import EvalDatasetConfig, resolve_eval_datasets
from slime.data.media import absent_file, collect_media
from slime.data.prompts import PromptRow, Report
from slime.data.rows import DataError, Problems, RowFile
from slime.data.source import BUILT_IN_SOURCES, prompt_maker
from slime.data.tokenizers import load_processor, load_tokenizer
from slime.types import Tokenizer

if TYPE_CHECKING:
    from slime.config.args import Args

LabelCheck = Callable[[str, object, Mapping[str, object]], str | None]
_ROWS_AT_ONCE = 1024
STREAMING_ROWS = 10_000  # rows that are checked at the start with --streaming-data


def check_data(args: Args, check_label: LabelCheck) -> list[str]:
    """Read all prompts (with ``--streaming-data`` only the first ones) and evaluation sets, and
    check rows and labels.

    Args:
        check_label: ``(rm_type, label, metadata) -> problem or None``, like
            :func:`slime.rollout.rm_hub.check_label`.

    Returns:
        One line for each problem, with file and line number; at most about twenty per file.
    """
    if check_multimodal_keys(args):  # which is told already, and without columns no row can be read
        return []

    def check_row(rm_type: str, label: object, metadata: Mapping[str, object]) -> str | None:
        own = str(metadata.get("rm_type") or "").strip()
        problem = reward_type_problem(own, args.rm_url) if own else None
        return f"reward type {own}: {problem}" if problem else check_label(rm_type, label, metadata)

    trust = {"trust_remote_code": True} if args.trust_remote_code else {}
    tokenizer = functools.cache(lambda: _tokenizer(args.hf_checkpoint, trust))
    found: list[str] = []
    run = EvalDatasetConfig.from_args(args)
    own_rollout = args.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION and not is_fully_async(
        args
    )
    # First the prompts of the training, then each evaluation set with settings of its own.
    if _reads_prompts(args):
        # else the name could not be loaded and is told
        if args.prompt_data and data_name(args.prompt_data) is None:
            make = prompt_maker(args)
            limit = STREAMING_ROWS if args.streaming_data else None
            rm_type = _reward_type(run, args.loss_type, own_rollout)
            sft = make.mask_type is not None
            found += _check_file(
                args.prompt_data, make, tokenizer, args.notices, rm_type, check_row, True, limit
            )
            if sft and args.apply_chat_template:
                found.append(
                    f"--apply-chat-template makes texts of messages, which {SFT_FUNCTION} needs: "
                    "leave it out"
                )
        elif not args.prompt_data:
            found.append(
                "no prompts: give --prompt-data FILE, or --disable-rollout-global-dataset with "
                "your functions"
            )
    try:
        datasets = resolve_eval_datasets(args)
    except (ValueError, TypeError, FileNotFoundError) as error:
        return [*found, str(error)]
    for config in datasets:
        found += _unusable(config, run, args.rm_url)
        rm_type = _reward_type(config, args.loss_type, own_rollout)
        make = config.prompt_maker()
        more = config.metadata_overrides
        make.load_processor = functools.partial(load_processor, args.hf_checkpoint, **trust)
        own_evaluation = args.eval_function_path not in OWN_FUNCTIONS
        make.rendered_later = not (own_evaluation or config.custom_generate_function_path)
        problems = _check_file(
            config.path, make, tokenizer, args.notices, rm_type, check_row, more=more
        )
        found += [f"evaluation set {config.name}: {problem}" for problem in problems]
    return found


def _tokenizer(checkpoint: str | None, options: Mapping[str, bool]) -> Tokenizer | None:
    """The tokenizer of a checkpoint that is on this machine; None for others."""
    if not checkpoint or read_chat_template(checkpoint) is None:
        return None
    if not Path(checkpoint).expanduser().is_dir():
        options = {**options, "local_files_only": True}
    # The rollout manager fails on it in the same way, and says so.
    with contextlib.suppress(Exception):
        return load_tokenizer(checkpoint, **options)
    return None


def _unusable(config: EvalDatasetConfig, run: EvalDatasetConfig, rm_url: str | None) -> list[str]:
    """The problems of the reward type and the functions of an evaluation set, if they are not those
    of the run.
    """
    # What the set has in common with the run is checked with the run.
    label = f"evaluation set {config.name}:"
    problems = []
    if config.rm_type and config.rm_type != run.rm_type and not config.custom_rm_path:
        problem = reward_type_problem(config.rm_type, rm_url)
        problems += [f"{label} rm_type {config.rm_type}: {problem}"] if problem else []
    for name in ("custom_rm_path", "custom_generate_function_path"):
        path = getattr(config, name)
        if (
            path
            and path != getattr(run, name)
            and (problem := hook_problem(f"{label} {name}", name, path))
        ):
            problems.append(problem)
    return problems


def _reads_prompts(args: Args) -> bool:
    """Whether the data source is a built-in one that will read ``--prompt-data``, or the user named
    a file anyway.
    """
    if args.load_debug_rollout_data:
        return False
    built_in = (
        args.data_source_path.rpartition(".")[0] in BUILT_IN_SOURCES and args.rollout_global_dataset
    )
    # Rollouts without engines, such as SFT, may need no file.
    needs_file = built_in and not args.debug_train_only
    return needs_file or bool(args.prompt_data)


def _reward_type(settings: EvalDatasetConfig, loss_type: str, own_rollout: bool) -> str | None:
    """The reward type for which labels are checked; "" if one is needed but not configured; None if
    none is needed.
    """
    if loss_type == "sft_loss" or settings.custom_rm_path:
        return None
    if settings.rm_type:
        return settings.rm_type
    users = settings.custom_generate_function_path or own_rollout
    return None if users else ""  # The user's own generate function may set rewards itself.


def _check_file(
    spec: str,
    make: PromptMaker,
    tokenizer: Callable[[], Tokenizer | None],
    notices: list[str],
    rm_type: str | None,
    check_label: LabelCheck,
    strict: bool = False,
    limit: int | None = None,
    more: Mapping[str, object] | None = None,
) -> list[str]:
    """The problems of a file, which is read part by part.

    Args:
        make: Parses the rows and tries what the run will do with them.
        tokenizer: Returns the tokenizer of the run, or None without one; only called if rows are
            rendered.
        notices: Gets a line if the rows are read in a way that is not plain.
        strict: Whether a column that was named but that no row has is always a problem, even if it
            is optional.
        limit: Maximum number of rows to check.
        more: Entries that every row's metadata get (``metadata_overrides``).
    """
    problems, labels, report = Problems(), Problems(), Report(make.keys)
    labelled, first = False, None
    try:
        rows = RowFile(spec)
        count = len(rows) if limit is None else min(limit, len(rows))
        # In parts, so that a file larger than the memory can be checked.
        for begin in range(0, count, _ROWS_AT_ONCE):
            prompts, part = make.parse(rows.read(range(begin, min(begin + _ROWS_AT_ONCE, count))))
            report.merge(part)
            for row in prompts:
                if make.tokenizer is None and isinstance(row.prompt, list):
                    make.tokenizer = tokenizer()
                for wrong in _row_problems(make, row):
                    problems.add(f"{row.where}: {wrong}")
            for row in prompts if rm_type is not None else ():
                row.metadata.update(more or {})
                first = first or row
                labelled = labelled or row.label is not None
                problem = check_label(rm_type or "math", row.label, row.metadata)
                # Without any label, the rows' problems are reported as one. But if the problem
                # would be the same with a label, the cause is in the row's metadata, so it is
                # reported for the row.
                if problem:
                    labelled = (
                        labelled or check_label(rm_type or "math", "0", row.metadata) == problem
                    )
                    labels.add(f"{row.where}: {problem}")
    except DataError as error:
        return error.problems
    # Problems of the whole file come after those of single rows have been counted.
    report.tell(spec, problems)
    notices += problems.notices
    for warning in problems.warnings if strict else ():
        problems.add(warning)
    if labelled:
        problems.extend(labels)
    elif first is not None and labels.count:
        said = check_label(rm_type or "math", first.label, first.metadata)
        column = f"no row has a label (column {make.keys.label!r}, --label-key)"
        unset = "there is neither --rm-type nor --custom-rm-path, and " if not rm_type else ""
        problems.add(f"{spec}: {unset}{column}; {said}")
    return problems.lines()


def _row_problems(make: PromptMaker, row: PromptRow) -> list[str]:
    """Why a row cannot be used, apart from its label."""
    media = (
        collect_media(row.prompt) if make.rendered_later and isinstance(row.prompt, list) else None
    )
    absent = [path for image in (media or {}).get("images", []) if (path := absent_file(image))]
    if absent:
        return [f"there is no image {shown(path)}" for path in absent]
    problem = make.problem(row)
    return [problem] if problem else []
