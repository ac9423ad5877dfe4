"""The data sets of an evaluation and their settings: ``--eval-prompt-data`` and ``--eval-config``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from slime.config.data import eval_pairs
from slime.config.files import load_yaml
from slime.data.prompts import RowKeys


@dataclass
class EvalDatasetConfig:
    """One data set of an evaluation. None means: as ``args`` say (see :func:`resolve_eval_datasets`)."""

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
    # Known names that nothing here reads; user functions may.
    app_service: Any = None
    eval_task_timeout: float | None = None
    min_eval_samples: int | None = None
    eval_early_stop_threshold: float | None = None
    eval_early_stop_patience: int | None = None
    message_processor: Any = None
    reward_model: Any = None
    remote_environment: Any = None

    def row_keys(self) -> RowKeys:
        """Columns of this data set, after resolution."""
        return RowKeys(
            self.input_key or "prompt", self.label_key, self.metadata_key, self.tool_key, self.multimodal_keys or {}
        )


# What a field falls back to: the first of these attributes of args that is there and not None.
_FALLBACKS: dict[str, tuple[str, ...]] = {
    "rm_type": ("rm_type",),
    "custom_rm_path": ("custom_rm_path",),
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
    "multimodal_keys": ("multimodal_keys",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt",),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "max_prompt_len": ("eval_max_prompt_len", "rollout_max_prompt_len"),
    "stop": ("rollout_stop",),
    "stop_token_ids": ("rollout_stop_token_ids",),
    "min_new_tokens": ("eval_min_new_tokens",),
    "skip_special_tokens": ("rollout_skip_special_tokens",),
    "custom_generate_function_path": ("custom_generate_function_path",),
}
_NAMES = {f.name for f in fields(EvalDatasetConfig)}
BY_TYPE = "slime.rollout.rm_hub.dispatch.by_type"
"""``custom_rm_path`` of a data set with an ``rm_type`` of its own: score by that type."""


def resolve_eval_datasets(args: Any) -> list[EvalDatasetConfig]:
    """All data sets to evaluate; each setting from its entry, else ``eval.defaults``, else ``args``.

    ``--eval-config`` replaces ``--eval-prompt-data`` (name path name path ...; one value alone is a
    data set named "aime").

    Raises:
        ValueError: an unknown key of ``eval.defaults``, a malformed file or list.
        TypeError: an unknown key of a data set.
        FileNotFoundError: no such ``--eval-config``.
    """
    if getattr(args, "eval_config", None):
        defaults, entries = _read(Path(args.eval_config).expanduser())
    else:
        defaults, entries = {}, _pairs(getattr(args, "eval_prompt_data", None) or [])
    names = [entry["name"] for entry in entries]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"evaluation data sets need different names; more than once: {', '.join(twice)}")
    return [_resolve(args, defaults, entry) for entry in entries]


def _resolve(args: Any, defaults: Mapping[str, Any], entry: Mapping[str, Any]) -> EvalDatasetConfig:
    unknown = sorted(set(entry) - _NAMES)
    if unknown:
        raise TypeError(f"evaluation data set {entry['name']!r} has unknown keys {', '.join(unknown)}")
    given = {**defaults, **entry}
    for key, value in given.items():
        _check_type(entry["name"], key, value)
    config = EvalDatasetConfig(**given)
    own = entry if entry.get("rm_type") or entry.get("custom_rm_path") else defaults
    if own.get("rm_type") and not own.get("custom_rm_path"):  # its type wins over the function of the run
        config.custom_rm_path = BY_TYPE if getattr(args, "custom_rm_path", None) else None
    for name, attributes in _FALLBACKS.items():
        values = (getattr(args, attribute, None) for attribute in attributes)
        if getattr(config, name) is None:
            setattr(config, name, next((v for v in values if v is not None), None))
    return config


_HINTS = get_type_hints(EvalDatasetConfig)


def _check_type(dataset: Any, key: str, value: Any) -> None:
    """YAML makes numbers, dates and mappings of words; each setting has one type.

    Raises:
        TypeError: it is another.
    """
    kinds = [get_origin(kind) or kind for kind in get_args(_HINTS[key]) or (_HINTS[key],)]
    if value is None or Any in kinds or key == "metadata_overrides":
        return
    wanted = [kind for kind in kinds if kind is not type(None)]
    right = type(value) in wanted or (float in wanted and type(value) is int)
    finite = not isinstance(value, float) or math.isfinite(value)
    plain = not isinstance(value, dict) or key != "multimodal_keys" or all(isinstance(v, str) for v in value.values())
    if not (right and finite and plain):
        words = " or ".join(kind.__name__ for kind in wanted)
        raise TypeError(f"evaluation data set {dataset!r}: {key} needs {words}, not {value!r}")


def _pairs(words: list[str]) -> list[dict[str, Any]]:
    pairs, problems = eval_pairs(words)
    if problems:
        raise ValueError(problems[0])
    return [{"name": name, "path": path} for name, path in pairs]


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if not path.is_file():
        raise FileNotFoundError(f"--eval-config {path} does not exist")
    try:
        content = load_yaml(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"--eval-config {path}: {error}") from error
    section = content.get("eval") if isinstance(content, dict) else None
    if not isinstance(section, dict) or not section.get("datasets"):
        raise ValueError(f"--eval-config {path} needs eval: {{defaults: {{...}}, datasets: [...]}}")
    defaults = section.get("defaults") or {}
    if not isinstance(defaults, dict):
        raise ValueError(f"--eval-config {path}: eval.defaults must be a mapping, not {defaults!r}")
    unknown = sorted(set(defaults) - (_NAMES - {"name", "path"}))
    if unknown:
        raise ValueError(f"--eval-config {path}: unknown keys in eval.defaults: {', '.join(unknown)}")
    entries = section["datasets"]
    if isinstance(entries, dict):
        entries = [
            {"name": name, **(entry if isinstance(entry, dict) else {"path": entry})} for name, entry in entries.items()
        ]
    if not isinstance(entries, list):
        raise ValueError(f"--eval-config {path}: eval.datasets must be a list or a mapping, not {entries!r}")
    for entry in entries:
        if not isinstance(entry, dict) or not entry.get("name") or not entry.get("path"):
            raise ValueError(f"--eval-config {path}: a data set needs name and path, this is {entry!r}")
    return defaults, entries
