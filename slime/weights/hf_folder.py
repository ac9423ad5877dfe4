"""A Hugging Face checkpoint on disk: read tensors one by one, write a new one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 * 1024**3
COPIED_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.jinja",
    "*processor*.json",
    "*.py",
)


def resolve_folder(path: str) -> Path:
    """The local folder of a checkpoint: itself, or where the hub's client keeps (or puts) it."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json", *COPIED_FILES]))


class HfFolder:
    """Tensors of a safetensors checkpoint by name, read when asked for."""

    def __init__(self, path: str | Path) -> None:
        """
        Raises:
            FileNotFoundError: the folder has no safetensors files.
        """
        self.path = resolve_folder(str(path))
        index = self.path / INDEX
        if index.is_file():
            self.files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            self.files = {}
            for file in sorted(self.path.glob("*.safetensors")):
                with safe_open(str(file), framework="pt") as opened:
                    self.files.update(dict.fromkeys(opened.keys(), file.name))
        if not self.files:
            raise FileNotFoundError(f"{self.path} holds no safetensors files: convert the checkpoint to safetensors")
        self._opened: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def get(self, name: str) -> Tensor:
        """One whole tensor, in the dtype of the file.

        Raises:
            KeyError: there is none of this name.
        """
        if name not in self.files:
            raise KeyError(f"{self.path} has no tensor {name!r}; it has {len(self.files)}, for example {self._some()}")
        file = self.files[name]
        if file not in self._opened:
            self._opened[file] = safe_open(str(self.path / file), framework="pt")
        tensor: Tensor = self._opened[file].get_tensor(name)
        return tensor

    def _some(self) -> str:
        return ", ".join(list(self.files)[:3])


def write_tensors(named: Iterable[tuple[str, Tensor]], path: Path, writer: bool) -> None:
    """Write a stream of tensors as safetensors files with an index; who does not write only exhausts the stream."""
    shards: list[tuple[str, list[str]]] = []
    pending: dict[str, Tensor] = {}
    total = size = 0
    if writer:
        path.mkdir(parents=True, exist_ok=True)

    def flush() -> None:
        file = f"model-{len(shards) + 1:05d}.safetensors"
        save_file(pending, str(path / file), metadata={"format": "pt"})
        shards.append((file, list(pending)))
        pending.clear()

    for name, tensor in named:
        if not writer:
            continue
        nbytes = tensor.numel() * tensor.element_size()
        if pending and size + nbytes > SHARD_BYTES:
            flush()
            size = 0
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size, total = size + nbytes, total + nbytes
    if not writer:
        return
    flush()
    if len(shards) == 1:
        (path / shards[0][0]).rename(path / "model.safetensors")
        return
    weight_map = {name: file for file, names in shards for name in names}
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))


def copy_companions(source: str | Path, path: Path) -> None:
    """Tokenizer, processor and model code of the checkpoint that a model came from."""
    for pattern in COPIED_FILES:
        for file in Path(source).glob(pattern):
            shutil.copy2(file, path / file.name)
