"""Names of files and folders as users type them."""

from __future__ import annotations

from pathlib import Path

PATH_FLAGS = frozenset(
    {
        "custom_config_path",
        "custom_generate_function_path",
        "custom_rm_path",
        "data_source_path",
        "dump_details",
        "eval_config",
        "eval_prompt_data",
        "hf_checkpoint",
        "load",
        "load_debug_rollout_data",
        "load_forge_rollout_data",
        "opd_teacher_load",
        "output_dir",
        "override",
        "prompt_data",
        "ref_load",
        "rm_model_path",
        "rollout_function_path",
        "save",
        "save_debug_rollout_data",
        "save_debug_train_data",
        "sglang_config",
        "update_weight_disk_dir",
    }
)
"""Flags whose value is, or begins with, the name of a file or folder."""
_LONGEST_NAME = 255  # bytes, of every file system in use
_LONGEST_PATH = 4095


def path_problem(text: str) -> str | None:
    """Why no file can have this name; None where one can."""
    raw = text.encode(errors="surrogateescape")
    if "\0" in text:
        return "the name of a file cannot hold a NUL character"
    if len(raw) > _LONGEST_PATH or any(len(part) > _LONGEST_NAME for part in raw.split(b"/")):
        return f"the name of a file or folder has at most {_LONGEST_NAME} bytes, a path {_LONGEST_PATH}"
    try:
        Path(text).expanduser()
    except RuntimeError:
        return f"there is no home folder {text.partition('/')[0]}"
    return None
