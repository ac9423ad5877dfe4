"""Checks of the data before any process starts. A tokenizer is loaded where rows are rendered with
its template.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slime.config.args import Args
from slime.config.data import reward_type_problem
from slime.config.files import data_name
from slime.config.flag import shown
from slime.config.hf_config import is_hf_folder, read_chat_template
from slime.config.hooks import hook_problem, load_function
from slime.config.rollout import OWN_FUNCTIONS
from slime.data.dataset import PromptMaker
from slime.data.eval_config import EvalDatasetConfig, resolve_eval_datasets
from slime.data.media import absent_file, collect_media
from slime.data.prompts import PromptRow, Report
from slime.data.rows import DataError, Problems, RowFile
from slime.data.source import BUILT_IN_SOURCES, prompt_maker
from slime.data.tokenizers import load_processor, load_tokenizer
from slime.types import Tokenizer

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
    check = _Check(args, check_label)
    # First the prompts of the training, then each evaluation set with settings of its own.
    found = check.prompts() if check.reads_prompts() else []
    try:
        datasets = resolve_eval_datasets(args)
    except (ValueError, TypeError, FileNotFoundError) as error:
        return [*found, str(error)]
    return found + [problem for config in datasets for problem in check.evaluation_set(config)]


@dataclass
class _Check:
    """The checks of one run."""

    args: Args
    check_of_type: LabelCheck

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        return _tokenizer(self.args.hf_checkpoint, self.args.trust_remote_code)

    @functools.cached_property
    def run(self) -> EvalDatasetConfig:
        return EvalDatasetConfig.from_args(self.args)

    def reads_prompts(self) -> bool:
        """Whether the data source is a built-in one that will read ``--prompt-data``, or the user
        named a file anyway.
        """
        args = self.args
        if args.load_debug_rollout_data:
            return False
        module = args.data_source_path.rpartition(".")[0]
        built_in = module in BUILT_IN_SOURCES and args.rollout_global_dataset
        # Rollouts without engines, such as SFT, may need no file.
        return bool(args.prompt_data) or (built_in and not args.debug_train_only)

    def prompts(self) -> list[str]:
        """The problems of ``--prompt-data``."""
        args = self.args
        if not args.prompt_data:
            return [
                "no prompts: give --prompt-data FILE, or --disable-rollout-global-dataset with "
                "your functions"
            ]
        if data_name(args.prompt_data) is not None:
            return []  # the name could not be loaded and is told
        source = args.data_source_path
        # One that cannot be loaded is told by the check of the hooks.
        unknown = hook_problem("--data-source-path", "data_source_path", source)
        maker = prompt_maker if unknown else getattr(load_function(source), "maker", prompt_maker)
        make = maker(args)
        template = read_chat_template(args.hf_checkpoint or "")
        for name in args.apply_chat_template_kwargs or ():
            if template and name not in template:
                args.notices.append(f"--apply-chat-template-kwargs: the template has no {name!r}")
        limit = STREAMING_ROWS if args.streaming_data else None
        return self.file(args.prompt_data, make, self.run, strict=True, limit=limit)

    def evaluation_set(self, config: EvalDatasetConfig) -> list[str]:
        """The problems of an evaluation set."""
        make = config.prompt_maker()
        make.load_processor = functools.partial(
            load_processor, self.args.hf_checkpoint, self.args.trust_remote_code
        )
        own_evaluation = self.args.eval_function_path not in OWN_FUNCTIONS
        make.rendered_later = not (own_evaluation or config.custom_generate_function_path)
        problems = self.file(config.path, make, config)
        return [
            *_unusable(config, self.run, self.args.rm_url),
            *(f"evaluation set {config.name}: {problem}" for problem in problems),
        ]

    def reward_type(self, settings: EvalDatasetConfig) -> str | None:
        """The reward type for which labels are checked; "" if one is needed but not configured;
        None if none is needed.
        """
        args = self.args
        if args.loss_type == "sft_loss" or settings.custom_rm_path:
            return None
        own_rollout = args.rollout_function_path not in OWN_FUNCTIONS
        # The user's own generate function may set rewards itself.
        users = settings.custom_generate_function_path or own_rollout
        return settings.rm_type or (None if users else "")

    def label(self, rm_type: str | None, row: PromptRow, label: object) -> str | None:
        """The problem of a label, which is that of ``row`` or another one."""
        own = str(row.metadata.get("rm_type") or "").strip()
        if own and (problem := reward_type_problem(own, self.args.rm_url)):
            return f"reward type {own}: {problem}"
        return self.check_of_type(rm_type or "math", label, row.metadata)

    def file(
        self,
        spec: str,
        make: PromptMaker,
        settings: EvalDatasetConfig,
        strict: bool = False,
        limit: int | None = None,
    ) -> list[str]:
        """The problems of a file, which is read in parts, since it may be larger than the memory.

        Args:
            make: Parses the rows and tries what the run will do with them.
            strict: Whether a column that was named but that no row has is always a problem, even if
                it is optional.
            limit: Maximum number of rows to check.
        """
        problems, label_problems = Problems(), Problems()
        report = Report(make.keys)
        rm_type = self.reward_type(settings)
        labelled = False
        first: PromptRow | None = None  # whose label was checked
        try:
            rows = RowFile(spec)
            count = min(limit or len(rows), len(rows))
            for begin in range(0, count, _ROWS_AT_ONCE):
                part = rows.read(range(begin, min(begin + _ROWS_AT_ONCE, count)))
                prompts, part_report = make.parse(part)
                report.merge(part_report)
                for row in prompts:
                    if make.tokenizer is None and isinstance(row.prompt, list):
                        make.tokenizer = self.tokenizer
                    for wrong in _row_problems(make, row):
                        problems.add(f"{row.where}: {wrong}")
                for row in prompts if rm_type is not None else ():
                    row.metadata.update(settings.metadata_overrides)
                    first = first or row
                    # Without any label, the rows' problems are reported as one. But if the problem
                    # would be the same with a label, the cause is in the row's metadata, so it is
                    # reported for the row.
                    problem = self.label(rm_type, row, row.label)
                    labelled = labelled or row.label is not None
                    if problem:
                        labelled = labelled or self.label(rm_type, row, "0") == problem
                        label_problems.add(f"{row.where}: {problem}")
        except DataError as error:
            return error.problems
        # Problems of the whole file come after those of single rows have been counted.
        report.tell(spec, problems)
        self.args.notices.extend(problems.notices)
        for warning in problems.warnings if strict else ():
            problems.add(warning)
        if labelled:
            problems.extend(label_problems)
        elif first is not None and label_problems.count:
            unset = "" if rm_type else "there is neither --rm-type nor --custom-rm-path, and "
            problems.add(
                f"{spec}: {unset}no row has a label (column {make.keys.label!r}, --label-key); the "
                f"rows have {report.names}; {self.label(rm_type, first, first.label)}"
            )
        return problems.lines()


def _tokenizer(checkpoint: str | None, trust: bool) -> Tokenizer | None:
    """The tokenizer of a checkpoint that is on this machine; None for others.

    Raises:
        DataError: The checkpoint is a folder without a tokenizer.
    """
    is_folder = is_hf_folder(checkpoint)
    if not checkpoint or (not is_folder and read_chat_template(checkpoint) is None):
        return None
    options = {} if is_folder else {"local_files_only": True}
    try:
        return load_tokenizer(checkpoint, trust, **options)
    except FileNotFoundError as error:
        raise DataError(f"--hf-checkpoint: {error}") from error
    except Exception:  # The rollout manager fails on it in the same way, and says so.
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
