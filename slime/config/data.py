"""Prompts: where they come from and how rows become samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.config.context import context_notice
from slime.config.files import file_of, first_row
from slime.config.flag import flag
from slime.config.reward import derive_reward

if TYPE_CHECKING:
    from slime.config.args import Args

DEFAULT_DATA_SOURCE = "slime.rollout.data_source.RolloutDataSourceWithBuffer"


@dataclass
class DataConfig:
    _title = "data"

    prompt_data: str | None = flag(None, help="JSONL, Parquet or JSON file; path@[a:b] takes a slice")
    input_key: str = flag("prompt", help="column of the prompt (text or messages)")
    label_key: str | None = flag("label", help="column of the label, if rows have it")
    metadata_key: str = flag("metadata", help="column of metadata (object or JSON string)")
    tool_key: str = flag("tools", help="column of tool schemas")
    multimodal_keys: dict[str, str] | None = flag(None, help='JSON; media type to column, {"image": "images"}')
    apply_chat_template: bool = flag(False, help="render messages with the tokenizer's template")
    apply_chat_template_kwargs: dict[str, Any] = flag({}, help="JSON; extra arguments of the template")
    num_rollout: int | None = flag(None, low=0, help="rollout-and-train iterations; default: one epoch")
    num_epoch: int | None = flag(None, low=1, help="epochs, when --num-rollout is not given")
    start_rollout_id: int | None = flag(None, low=0, help="where to go on; default: after the loaded checkpoint")
    rollout_shuffle: bool = flag(False, help="shuffle the prompts in each epoch")
    rollout_seed: int = flag(42, help="seed of shuffling and of sampling")
    rollout_global_dataset: bool = flag(
        True,
        option="--disable-rollout-global-dataset",
        kind="negative",
        help="the user's data source manages the data",
    )
    data_source_path: str = flag(
        DEFAULT_DATA_SOURCE,
        kind="hook",
        help="class of the data source",
    )
    buffer_filter_path: str | None = flag(None, kind="hook", help="chooses groups from the buffer")
    num_data_workers: int = flag(
        0,
        low=0,
        help="processes that parse, render and count the tokens of --prompt-data; 0: the rollout manager itself. The "
        "order is the same",
    )
    streaming_data: bool = flag(
        False,
        help="read rows of --prompt-data when they are needed, in memory that does not grow with the file. The order "
        "is the same; before the start the first 10,000 rows are checked, later ones when they are reached",
    )
    loss_mask_type: str = flag(
        "qwen", choices=("qwen", "qwen3", "qwen3_5", "distill_qwen"), help="chat format for SFT masks"
    )


def derive_data(args: Args) -> None:
    row = first_row(args.prompt_data) if args.prompt_data and args.rollout_global_dataset else None
    if row is not None:
        if "input_key" not in args.explicit and args.input_key not in row and "input" in row:
            args.input_key = "input"
            args.notices.append("rows have no 'prompt' but an 'input': it is used (--input-key)")
        if "label_key" not in args.explicit and args.label_key not in row:
            args.label_key = None
    if args.rollout_max_prompt_len is None and args.rollout_max_context_len is not None:
        args.rollout_max_prompt_len = args.rollout_max_context_len - 1
    if not args.debug_train_only and (notice := context_notice(args)) is not None:
        args.notices.append(notice)
    if args.over_sampling_batch_size is None:
        args.over_sampling_batch_size = args.rollout_batch_size
    derive_reward(args, row)


def check_data_files(args: Args) -> list[str]:
    needs_data = args.rollout_global_dataset and not args.load_debug_rollout_data
    custom_source = args.data_source_path != DEFAULT_DATA_SOURCE
    if args.prompt_data is None:
        if needs_data and not custom_source:
            return ["no --prompt-data: name a JSONL or Parquet file (or a source of your own with --data-source-path)"]
        return []
    if file_of(args.prompt_data).is_file() or custom_source:
        return []
    return [f"--prompt-data {args.prompt_data}: no such file"]


def check_multimodal_keys(args: Args) -> list[str]:
    wrong = {kind: column for kind, column in (args.multimodal_keys or {}).items() if not isinstance(column, str)}
    return [f"--multimodal-keys: {kind!r} needs the name of a column, not {column!r}" for kind, column in wrong.items()]
