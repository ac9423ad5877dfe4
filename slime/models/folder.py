"""The folder of a Hugging Face checkpoint, and what its config.json says about quantization. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

COPIED_FILES = (
    "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.model", "*.jinja", "*processor*.json", "*.py",
)  # fmt: skip


def resolve_folder(path: str | Path) -> Path:
    """Return the local folder of a checkpoint. A hub id is downloaded if it is not in the local cache."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(path), allow_patterns=["*.safetensors", "*.json", *COPIED_FILES]))


def local_folder(path: str | Path) -> Path | None:
    """Return the local folder of a checkpoint without a download: None for a hub id that is not cached."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        found = Path(snapshot_download(str(path), allow_patterns=["*.json"], local_files_only=True))
    except (OSError, ValueError):  # nothing is cached, or no hub id
        return None
    return found if any(found.glob("*.safetensors")) else None


def quantization_of(config: Mapping[str, object]) -> dict[str, object] | None:
    """Return the ``quantization_config`` of a config.json (of the model or of its text part), or None."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        if found := part.get("quantization_config") or part.get("compression_config"):
            return dict(found) if isinstance(found, Mapping) else {"quant_method": repr(found)}
    return None
