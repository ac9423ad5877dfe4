"""The folder of a Hugging Face checkpoint, and what its config.json says about quantization. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

from slime.models.shards import ModelError

_HUB_SECONDS = 5.0
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
    """Return the local folder of a checkpoint. A hub id is downloaded if it is not in the local cache.

    Raises:
        ModelError: The hub does not give the model, and it is not in the cache.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    require_hub(str(path))
    return Path(snapshot_download(str(path), allow_patterns=_FETCHED))


def require_hub(name: str) -> None:
    """Ask the hub for a model, once and for a few seconds, unlike transformers, which waits for a minute. If there is
    no answer but the model is in the local cache, this process and those that it starts ask no hub from now on.

    Raises:
        ModelError: The hub does not give the model, and it is not in the cache.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_SECONDS)
    except Exception as error:  # OSError, or an error of the HTTP client of the release
        if cached_folder(name) is None:
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ModelError(
                f"{name} is not on this machine, and the hub does not give it ({why}). Where there is a network, run "
                f"hf download {name} --local-dir FOLDER, and pass the folder"
            ) from error
        os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE = "1", True


def local_folder(path: str | Path) -> Path | None:
    """Return the local folder of a checkpoint without a download: None for a hub id whose weights are not cached."""
    folder = cached_folder(path)
    found = folder is not None and (Path(path).expanduser().is_dir() or any(folder.glob("*.safetensors")))
    return folder if found else None


def cached_folder(path: str | Path) -> Path | None:
    """Return the local folder of a checkpoint, which may lack its weights; None for a hub id that is not cached."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json"], local_files_only=True))
    except (OSError, ValueError):  # nothing is cached, or no hub id
        return None


def quantization_of(config: Mapping[str, object]) -> dict[str, object] | None:
    """Return the ``quantization_config`` of a config.json (of the model or of its text part), or None."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        if found := part.get("quantization_config") or part.get("compression_config"):
            return dict(found) if isinstance(found, Mapping) else {"quant_method": repr(found)}
    return None
