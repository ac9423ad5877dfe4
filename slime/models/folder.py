"""The folder of a Hugging Face checkpoint, and what its config.json says about quantization. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

_FETCHED = [
    "*.safetensors", "*.json", "tokenizer*", "vocab.*", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py", "LICENSE*",
]  # fmt: skip
_WEIGHTS = (
    "*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx*",
    "config.json", ".*",
)  # fmt: skip
"""Files of a checkpoint that an export has of its own or not at all."""


def side_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a checkpoint besides weights and config.json, relative to its folder.

    Of subfolders these are only templates and model code, and none of one that is a checkpoint itself.
    """
    inside = [file for file in folder.glob("*/*") if file.suffix in (".jinja", ".py")]
    for file in (*folder.glob("*"), *(file for file in inside if not (file.parent / "config.json").exists())):
        if file.is_file() and not any(fnmatch(part, w) for part in file.relative_to(folder).parts for w in _WEIGHTS):
            yield file.relative_to(folder)


def resolve_folder(path: str | Path) -> Path:
    """Return the local folder of a checkpoint. A hub id is downloaded if it is not in the local cache."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(path), allow_patterns=_FETCHED))


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
