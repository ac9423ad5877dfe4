"""Prompts: where they come from and how rows become samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.config.flag import flag

_NO_BUFFER = "there is no buffer server; write the exchange as --rollout-function-path or --data-source-path"


@dataclass
class DataConfig:
    _title = "data"

    prompt_data: str = flag(None, help="JSONL, Parquet or JSON file; path@[a:b] takes a slice")
    input_key: str = flag("prompt", help="column of the prompt (text or messages)")
    label_key: str = flag("label", help="column of the label, if rows have it")
    metadata_key: str = flag("metadata", help="column of metadata (object or JSON string)")
    tool_key: str = flag("tools", help="column of tool schemas")
    multimodal_keys: dict[str, str] | None = flag(None, help='JSON; media type to column, {"image": "images"}')
    apply_chat_template: bool = flag(False, help="render messages with the tokenizer's template")
    apply_chat_template_kwargs: dict[str, Any] = flag({}, help="JSON; extra arguments of the template")
    num_rollout: int = flag(None, low=0, help="rollout-and-train iterations; default: one epoch")
    num_epoch: int = flag(None, low=1, help="epochs, when --num-rollout is not given")
    start_rollout_id: int = flag(None, low=0, help="where to go on; default: after the loaded checkpoint")
    rollout_shuffle: bool = flag(False, help="shuffle the prompts in each epoch")
    rollout_seed: int = flag(42, help="seed of shuffling and of sampling")
    rollout_global_dataset: bool = flag(
        True,
        option="--disable-rollout-global-dataset",
        kind="negative",
        help="the user's data source manages the data",
    )
    data_source_path: str = flag(
        "slime.rollout.data_source.RolloutDataSourceWithBuffer",
        kind="hook",
        help="class of the data source",
    )
    buffer_filter_path: str = flag(None, kind="hook", help="chooses groups from the buffer")
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
    rollout_task_type: str = flag(
        "math", help="task of an external rollout buffer", status="refused", reason=_NO_BUFFER
    )
    rollout_buffer_url: str = flag(None, help="external rollout buffer server", status="refused", reason=_NO_BUFFER)
    fetch_trajectory_retry_times: int = flag(
        -1, help="tries to fetch from the rollout buffer", status="refused", reason=_NO_BUFFER
    )
    min_batch_collection_ratio: float = flag(
        1.0, help="share of a batch to wait for", status="notice", reason="it has no reader"
    )
