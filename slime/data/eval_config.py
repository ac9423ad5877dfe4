"""The evaluation data sets and their settings, from ``--eval-prompt-data`` or ``--eval-config``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from slime.config.args import FLAGS, Args
from slime.config.files import NamedDataError, data_name, load_yaml
from slime.config.flag import Flag, OutOfRange, convert, did_you_mean
from slime.data.dataset import PromptMaker
from slime.data.prompts import RowKeys
from slime.types import JsonObject

BY_TYPE = ""
"""Value of ``custom_rm_path`` for a data set with an ``rm_type`` of its own in a run with
``--custom-rm-path``.
"""


@dataclass
class EvalDatasetConfig:
    """One data set of an evaluation. None stands for the value of ``args``, see
    :func:`resolve_eval_datasets`.
    """

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    multimodal_keys: dict[str, str] | None = None
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    max_prompt_len: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)
    # The package does not read the following fields, but users' functions may.
    app_service: object = None
    eval_task_timeout: float | None = None
    min_eval_samples: int | None = None
    eval_early_stop_threshold: float | None = None
    eval_early_stop_patience: int | None = None
    message_processor: object = None
    reward_model: object = None
    remote_environment: object = None

    @classmethod
    def from_args(cls, args: Args) -> EvalDatasetConfig:
        """The settings that the flags give for all data sets, without name and path."""
        of_run = {
            _setting_of(flag): value
            for flag in _OF_RUN
            if (value := getattr(args, flag)) is not None
        }
        return cls(name="", path="", **of_run)

    def prompt_maker(self) -> PromptMaker:
        """What makes prompts of the rows of this data set, after :func:`resolve_eval_datasets`;
        without a tokenizer.
        """
        return PromptMaker(
            RowKeys(
                self.input_key or "prompt",
                self.label_key,
                self.metadata_key,
                self.tool_key,
                self.multimodal_keys or {},
            ),
            max_length=self.max_prompt_len,
            apply_chat_template=bool(self.apply_chat_template),
            template_kwargs=dict(self.apply_chat_template_kwargs or {}),
        )


_OF_RUN = (
    "rm_type", "custom_rm_path", "input_key", "label_key", "tool_key", "metadata_key", "multimodal_keys",
    "apply_chat_template", "apply_chat_template_kwargs", "n_samples_per_eval_prompt", "rollout_temperature",
    "rollout_top_p", "rollout_top_k", "rollout_max_response_len", "rollout_max_prompt_len", "rollout_stop",
    "rollout_stop_token_ids", "rollout_skip_special_tokens", "custom_generate_function_path",
    "eval_input_key", "eval_label_key", "eval_tool_key", "eval_temperature", "eval_top_p", "eval_top_k",
    "eval_max_response_len", "eval_max_prompt_len", "eval_min_new_tokens",
)  # fmt: skip
"""The flags that give settings, later ones before earlier ones."""


def _setting_of(flag: str) -> str:
    return flag.removeprefix("rollout_").removeprefix("eval_")


_FLAG_OF = {_setting_of(flag): flag for flag in _OF_RUN}
"""The flag of each setting that has one."""
_OTHERS = {
    name: Flag(name, name, "value", kind, None, "")
    for name, kind in {
        "name": str, "path": str, "repetition_penalty": float, "no_stop_trim": bool, "metadata_overrides": dict,
    }.items()
}  # fmt: skip
"""How the values of other settings are read."""
_NAMES = {f.name for f in fields(EvalDatasetConfig)}


def resolve_eval_datasets(args: Args) -> list[EvalDatasetConfig]:
    """All data sets to evaluate. Each setting comes from the data set's entry, ``eval.defaults`` or
    ``args``.

    ``--eval-config`` replaces ``--eval-prompt-data`` (name path name path ...; a single value is a
    data set with the name "aime").

    Raises:
        ValueError: A key of ``eval.defaults`` is unknown, the file or list is malformed, a number
            is out of range, or a data set cannot be loaded by its name.
        TypeError: A key of a data set is unknown, or a value has the wrong type.
        FileNotFoundError: The file of ``--eval-config`` does not exist.
    """
    if args.eval_config:
        defaults, entries = _read(Path(args.eval_config).expanduser())
    else:
        words = args.eval_prompt_data or []
        # for compatibility with older scripts
        words = ["aime", *words] if len(words) == 1 else words
        if len(words) % 2:
            raise ValueError(
                f"--eval-prompt-data needs pairs of NAME PATH, but has {len(words)} words: "
                f"{' '.join(words)}"
            )
        defaults = {}
        entries = [
            {"name": name, "path": path} for name, path in zip(words[::2], words[1::2], strict=True)
        ]
    # Metrics and files of an evaluation are named after its data set.
    names = [entry["name"] for entry in entries]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"evaluation data sets need different names; used more than once: {', '.join(twice)}"
        )
    run = EvalDatasetConfig.from_args(args)
    return [_with_file(_resolve(run, defaults, entry)) for entry in entries]


def _with_file(config: EvalDatasetConfig) -> EvalDatasetConfig:
    """Replace the name of a data set by the file with its rows.

    Raises:
        ValueError: It cannot be loaded.
    """
    name = data_name(config.path)
    if name is None:
        return config
    try:
        return replace(config, path=name.file())
    except NamedDataError as error:
        raise ValueError(f"evaluation set {config.name}, {config.path}: {error}") from error


def _resolve(run: EvalDatasetConfig, defaults: JsonObject, entry: JsonObject) -> EvalDatasetConfig:
    unknown = sorted(set(entry) - _NAMES)
    if unknown:
        raise TypeError(
            f"evaluation data set {entry['name']!r} has unknown keys {', '.join(unknown)}"
            f"{did_you_mean(unknown[0], _NAMES)}"
        )
    given: dict[str, Any] = {**defaults, **entry}
    config = EvalDatasetConfig(
        **{key: _converted(entry["name"], key, value) for key, value in given.items()}
    )
    own = entry if entry.get("rm_type") or entry.get("custom_rm_path") else defaults
    # A reward type in the file is more specific than the reward function that the flags set for the
    # whole run.
    if own.get("rm_type") and not own.get("custom_rm_path"):
        config.custom_rm_path = BY_TYPE if run.custom_rm_path else None
    # The order of precedence is entry, defaults of the file, flags.
    for name in _NAMES:
        if getattr(config, name) is None:
            setattr(config, name, getattr(run, name))
    return config


def _converted(dataset: object, key: str, value: object) -> Any:
    """Convert a value as that of the flag for all data sets, since YAML reads some words as numbers,
    dates or mappings.

    Raises:
        TypeError: The value has another type than the setting.
        ValueError: It is outside the range of the flag.
    """
    flag = FLAGS[_FLAG_OF[key]] if key in _FLAG_OF else _OTHERS.get(key)
    if value is None or flag is None:
        return value
    try:
        return convert(flag, value)
    except OutOfRange as error:
        raise ValueError(f"evaluation data set {dataset!r}: {key} {value} {error}") from error
    except ValueError as error:
        raise TypeError(f"evaluation data set {dataset!r}: {key}: {error}") from error


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if not path.is_file():
        raise FileNotFoundError(f"--eval-config {path} does not exist")
    try:
        content = load_yaml(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"--eval-config {path}: {error}") from error
    # Files of other frameworks have further sections beside ``eval``.
    section = content.get("eval") if isinstance(content, dict) else None
    if not isinstance(section, dict) or not section.get("datasets"):
        raise ValueError(f"--eval-config {path} needs eval: {{defaults: {{...}}, datasets: [...]}}")
    defaults = section.get("defaults") or {}
    if not isinstance(defaults, dict):
        raise ValueError(f"--eval-config {path}: eval.defaults must be a mapping, not {defaults!r}")
    unknown = sorted(set(defaults) - (_NAMES - {"name", "path"}))
    if unknown:
        raise ValueError(
            f"--eval-config {path}: unknown keys in eval.defaults: {', '.join(unknown)}"
        )
    entries = section["datasets"]
    # Both forms are in use: a list of entries with names, and a mapping from names to paths or
    # entries.
    if isinstance(entries, dict):
        entries = [
            {"name": name, **(entry if isinstance(entry, dict) else {"path": entry})}
            for name, entry in entries.items()
        ]
    if not isinstance(entries, list):
        raise ValueError(
            f"--eval-config {path}: eval.datasets must be a list or a mapping, not {entries!r}"
        )
    for entry in entries:
        if not isinstance(entry, dict) or not entry.get("name") or not entry.get("path"):
            raise ValueError(
                f"--eval-config {path}: a data set needs name and path, this is {entry!r}"
            )
    return defaults, entries
