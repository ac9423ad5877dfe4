"""The folder of a Hugging Face checkpoint: its safetensors files and the tensors in them, read only
from the headers, its other files, and what its config.json says about quantization. Imports no
torch.

A safetensors file begins with the length of its header (unsigned 64-bit, little endian) and the
header, a JSON object ``{name: {"dtype", "shape", "data_offsets"}}``
(https://github.com/huggingface/safetensors#format). Reading the headers takes milliseconds and
finds every file that is missing, empty, truncated or of another format.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHOWN = 5
_PART = 2**20
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.weight(?:_packed)?$")
_EMBEDDING = re.compile(
    r"(?:^|\.)(?:embed_tokens|word_embeddings|embeddings?|wte|embed_in)\.weight$"
)

UNTIES = "has an output layer that is not its embedding, but config.json says that it is"
"""The beginning of a notice: transformers unties such a model, other programs drop its output
layer.
"""

_DAMAGES = {
    "header too": "is not a safetensors file",
    "invalid header length": "is truncated",
    "incomplete metadata": "is truncated, or has bytes after its last tensor",
}
"""What the library says of a damage -> what is wrong with the file."""
PLAIN_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes of weights that need no scale."""


class ModelError(ValueError):
    """The folder, the architecture or the chosen attention cannot be used. The message says what to
    change.
    """


class TensorHeader(NamedTuple):
    """The description of a tensor in the header of its file."""

    file: str
    dtype: str
    """The name of the dtype in safetensors: ``F32``, ``BF16``, ``F8_E4M3``, ``U8``, ..."""
    shape: tuple[int, ...]


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Read the headers of all tensors of a checkpoint.

    Returns:
        The headers by tensor name; empty for a folder without safetensors files.

    Raises:
        ModelError: The index or files are damaged or missing. The message names all of them.
    """
    problems: list[str] = []
    files, indexed = _weight_files(folder, problems)
    headers: dict[str, TensorHeader] = {}
    for file in files:
        try:
            headers.update(_file_headers(folder / file))
        except ValueError as error:
            problems.append(f"{file} {error}")
        except OSError as error:  # such as a name in the index that no file can have
            problems.append(f"{file[:80]} cannot be read: {error.strerror}")
    lost = [
        name
        for name, file in indexed.items()
        if name not in headers and not any(file in p for p in problems)
    ]
    if lost:
        problems.append(f"{INDEX} lists tensors that its files do not contain: {shorten(lost)}")
    if problems:
        raise ModelError(
            f"checkpoint {folder} is damaged or incomplete: {'; '.join(problems)}. Download or "
            "copy these files again"
        )
    return headers


def _weight_files(folder: Path, problems: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the names of the weight files, and ``{tensor: file}`` of the index if there is one."""
    index = folder / INDEX
    if not index.is_file():
        if (folder / _SINGLE).is_file():
            return [_SINGLE], {}
        return sorted(file.name for file in folder.glob("*.safetensors")), {}
    try:
        indexed = json.loads(index.read_bytes())["weight_map"]
        names = {str(tensor): str(file) for tensor, file in indexed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problems.append(
            f'{INDEX} is not an index ({{"weight_map": {{tensor: file}}}}): '
            f"{type(error).__name__} {error}"
        )
        return [], {}
    outside = sorted({file for file in names.values() if Path(file).name != file})
    if outside:
        problems.append(f"{INDEX} names files outside the folder: {shorten(outside)}")
    if not names:
        problems.append(f"{INDEX} lists no tensors")
    return sorted(set(names.values()) - set(outside)), names


def _file_headers(path: Path) -> dict[str, TensorHeader]:
    """Read the headers of one file. The message of a ValueError continues a sentence that begins
    with the file name.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ValueError("is missing")
    try:
        with open(path, "rb") as file:
            start = file.read(8)
        if not start:
            raise ValueError("is empty")
        if start == b"version ":
            raise ValueError("is a Git LFS pointer, not the weights (run git lfs pull)")
        # The library compares the header with the size of the file, so that a download that was
        # cut off is found without reading it.
        with safe_open(str(path), framework="np") as opened:
            stored = {name: opened.get_slice(name) for name in opened.offset_keys()}
            return {
                name: TensorHeader(path.name, tensor.get_dtype(), tuple(tensor.get_shape()))
                for name, tensor in stored.items()
            }
    except (OSError, SafetensorError) as error:
        known = (words for kind, words in _DAMAGES.items() if kind in str(error))
        what = next(known, "cannot be read as safetensors")
        raise ValueError(f"{what} ({error})"[:2000]) from error


def own_head(folder: Path, headers: Mapping[str, TensorHeader]) -> str | None:
    """Return the name of an output layer that differs from the input embedding; None if the files
    have no such one.

    A model whose config.json ties the two can only be loaded without loss if there is none.
    """
    for head in filter(_HEAD.search, headers):
        shape = headers[head].shape
        embeddings = [
            name for name in headers if _EMBEDDING.search(name) and headers[name].shape == shape
        ]
        if not any(_same_bytes(folder, headers, head, name) for name in embeddings):
            return head
    return None


def _same_bytes(folder: Path, headers: Mapping[str, TensorHeader], one: str, other: str) -> bool:
    if headers[one].dtype != headers[other].dtype:
        return False
    parts = (_parts(folder / headers[name].file, name) for name in (one, other))
    return all(a == b for a, b in zip(*parts, strict=True))


def _parts(path: Path, name: str) -> Iterator[bytes]:
    """Yield the bytes of a tensor in parts of at most a megabyte."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
        file.seek(8 + length + begin)
        for left in range(end - begin, 0, -_PART):
            yield file.read(min(left, _PART))


def shorten(names: Iterable[str], shown: int = _SHOWN) -> str:
    """Join names like ``a, b, c and 7 more``."""
    every = list(names)
    rest = f" and {len(every) - shown} more" if len(every) > shown else ""
    return ", ".join(every[:shown]) + rest


def require_plain(folder: Path, headers: Mapping[str, TensorHeader]) -> None:
    """Refuse floats of 8 bits or less without a scale, because their values are not the weights.

    Raises:
        ModelError: There are such tensors. The message names them.
    """
    small = [
        f"{name} ({h.dtype} in {h.file})"
        for name, h in headers.items()
        if h.dtype[:2] in ("F8", "F4", "F6")
    ]
    if small:
        raise ModelError(
            f"checkpoint {folder} has {len(small)} quantized tensors without a scale, and its "
            f"config.json has no quantization_config for them: {shorten(small)}. Use the bfloat16 "
            "version of the model, or restore quantization_config"
        )


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

    Of subfolders these are only templates and model code, and none of one that is a checkpoint
    itself.
    """
    inside = [file for file in folder.glob("*/*") if file.suffix in (".jinja", ".py")]
    for file in (
        *folder.glob("*"),
        *(file for file in inside if not (file.parent / "config.json").exists()),
    ):
        if file.is_file() and not any(
            fnmatch(part, w) for part in file.relative_to(folder).parts for w in _WEIGHTS
        ):
            yield file.relative_to(folder)


def copy_side_files(source: Path, target: Path) -> None:
    """Copy :func:`side_files` byte for byte into an existing folder."""
    for file in side_files(source):
        (target / file).parent.mkdir(exist_ok=True)
        shutil.copy2(source / file, target / file)


def resolve_folder(path: str | Path) -> Path:
    """Return the local folder of a checkpoint. A hub id is downloaded if it is not in the local
    cache.

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
    """Ask the hub for a model, once and for a few seconds, unlike transformers, which waits for a
    minute. If there is no answer but the model is in the local cache, this process and those that
    it starts ask no hub from now on.

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
                f"{name} is not on this machine, and the hub does not give it ({why}). Where "
                f"there is a network, run hf download {name} --local-dir FOLDER, and pass the "
                "folder"
            ) from error
        os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE = "1", True


def local_folder(path: str | Path) -> Path | None:
    """Return the local folder of a checkpoint without a download: None for a hub id whose weights
    are not cached.
    """
    folder = cached_folder(path)
    found = folder is not None and (
        Path(path).expanduser().is_dir() or any(folder.glob("*.safetensors"))
    )
    return folder if found else None


def cached_folder(path: str | Path) -> Path | None:
    """Return the local folder of a checkpoint, which may lack its weights; None for a hub id that
    is not cached.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json"], local_files_only=True))
    except (OSError, ValueError):  # nothing is cached, or no hub id
        return None


def quantization_of(config: Mapping[str, object]) -> dict[str, object] | None:
    """Return the ``quantization_config`` of a config.json (of the model or of its text part), or
    None.
    """
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        if found := part.get("quantization_config") or part.get("compression_config"):
            return dict(found) if isinstance(found, Mapping) else {"quant_method": repr(found)}
    return None
