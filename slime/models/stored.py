"""The weights of a checkpoint folder by name, which are read one by one and dequantized if needed,
and a new folder.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slime.models.quantized import Plan, plan
from slime.models.shards import (
    INDEX,
    PLAIN_FLOATS,
    ModelError,
    TensorHeader,
    quantization_of,
    read_headers,
    require_plain,
    shorten,
)


class NamedWeights(ABC):
    """The weights of a checkpoint under their Hugging Face names. A weight is read when it is
    requested.
    """

    folder: Path
    fault: ModelError | None = None
    """The error of a read, which may have happened on another thread."""

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights by name."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one weight.

        Raises:
            KeyError: There is no weight with this name.
        """

    @abstractmethod
    def dtype_of(self, name: str) -> str:
        """Return the dtype in which a weight is stored, for messages."""

    @abstractmethod
    def is_float(self, name: str) -> bool: ...

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def where(self, name: str) -> str:
        """Return the name of the file that contains a weight (its first part), for messages."""

    @abstractmethod
    def get(self, name: str, index: EllipsisType | tuple[slice, ...] = ...) -> Tensor:
        """Read one weight, or a part of it.

        Raises:
            KeyError: There is no weight with this name.
            ModelError: The weight has values that are not finite.
        """

    def require_finite(self, name: str, tensor: Tensor) -> Tensor:
        """Return ``tensor``, which was read from the weight ``name``.

        Raises:
            ModelError: It has values that are not finite.
        """
        if not is_finite(tensor):
            self.fault = ModelError(
                f"{name!r} in {self.folder / self.where(name)} has NaN or infinite values: the "
                "checkpoint is damaged"
            )
            raise self.fault
        return tensor

    def __getitem__(self, name: str) -> StoredTensor:
        """Return a weight that is read only when it is indexed.

        Raises:
            KeyError: There is no weight with this name.
        """
        return StoredTensor(self, name, self.shape(name))

    def lazy(self) -> dict[str, Any]:
        """Return all weights as objects that transformers reads with ``[...]`` when it needs
        them.
        """
        return {name: self[name] for name in self.shapes()}

    def empty(self) -> dict[str, Tensor]:
        """Return tensors without memory (``meta``) in their place."""
        return {name: torch.empty(shape, device="meta") for name, shape in self.shapes().items()}


SHARD_BYTES = 4 * 1024**3
PLAIN_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class StoredWeights(NamedWeights):
    """The weights in a folder of safetensors files.

    Quantized weights (:mod:`slime.models.quantized`) are dequantized when they are read, one tensor
    at a time, to the ``dtype`` of config.json (default: bfloat16).
    """

    def __init__(self, folder: Path) -> None:
        """Read only the headers.

        Raises:
            ModelError: There are no safetensors files, a file is damaged, or the quantization is
                not supported.
        """
        self.folder = folder
        self.headers = read_headers(folder)
        if not self.headers:
            raise ModelError(
                f"{folder} has no safetensors files: convert the checkpoint to safetensors"
            )
        config = _read_config(folder)
        quantization = quantization_of(config)
        self._opened: dict[str, Any] = {}
        self.dtype = _nominal_dtype(config)
        self.plan = Plan({}, frozenset())
        if quantization is not None:
            self.plan = plan(str(folder), quantization, self.headers, self.read)
        used = {
            part for weight in self.plan.weights.values() for part in weight.parts
        } | self.plan.left_out
        self.plain: dict[str, TensorHeader] = {
            n: h for n, h in self.headers.items() if n not in used
        }
        """Tensors that are stored as they are."""
        require_plain(folder, self.plain)

    @property
    def is_quantized(self) -> bool:
        return bool(self.plan.weights)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights by name."""
        return {name: self.shape(name) for name in (*self.plain, *self.plan.weights)}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one weight.

        Raises:
            KeyError: There is no weight with this name.
        """
        if name in self.plan.weights:
            return self.plan.weights[name].shape
        if name in self.plain:
            return self.plain[name].shape
        every = [*self.plain, *self.plan.weights]
        raise KeyError(
            f"{self.folder} has no tensor {name!r}; it has {len(every)}, for example "
            f"{shorten(every, 3)}"
        )

    def dtype_of(self, name: str) -> str:
        """Return the dtype in which a weight is stored, for messages."""
        return self.plain[name].dtype

    def is_float(self, name: str) -> bool:
        return name in self.plan.weights or self.plain[name].dtype in PLAIN_FLOATS

    def __contains__(self, name: str) -> bool:
        return name in self.plain or name in self.plan.weights

    def where(self, name: str) -> str:
        """Return the name of the file that contains a weight (its first part), for messages."""
        return self.headers[
            self.plan.weights[name].parts[0] if name in self.plan.weights else name
        ].file

    def get(self, name: str, index: EllipsisType | tuple[slice, ...] = ...) -> Tensor:
        """Read one weight, or a part of it.

        Its dtype is that of the file, or that of config.json if it is dequantized. For a part, only
        the bytes of the part are read, except that a quantized weight is always read as a whole.

        Raises:
            KeyError: There is no weight with this name.
            ModelError: The weight has values that are not finite.
        """
        self.shape(name)  # raises KeyError
        if name in self.plan.weights:
            tensor = self.plan.weights[name].compute(self.read).to(self.dtype)[index]
        else:
            tensor = self.read(name, index)
        return self.require_finite(name, tensor)

    def store(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensors that the files would have for new values of one weight, quantized and
        in the dtypes that they have there. A weight that the folder lacks keeps its dtype.

        Raises:
            ModelError: The weight has another shape in the folder.
        """
        if name not in self:
            return {name: tensor}
        if tuple(tensor.shape) != self.shape(name):
            raise ModelError(
                f"{name} has shape {list(tensor.shape)}, but {list(self.shape(name))} in "
                f"{self.folder}: it cannot be written as that checkpoint stores it"
            )
        if name in self.plan.weights:
            return self.plan.weights[name].store(tensor, self.read)
        return {name: tensor.to(PLAIN_DTYPES.get(self.plain[name].dtype, tensor.dtype))}

    def read(self, name: str, index: EllipsisType | tuple[slice, ...] = ...) -> Tensor:
        """Read a stored tensor, or a part of it, as it is, also one that is only a part of a
        weight.
        """
        file = self.headers[name].file
        if file not in self._opened:
            self._opened[file] = safe_open(str(self.folder / file), framework="pt")
        if index is ...:
            tensor: Tensor = self._opened[file].get_tensor(name)
        else:
            tensor = self._opened[file].get_slice(name)[index]
        return tensor


class StoredTensor:
    """A weight in a folder. Indexing reads it, or a part of it, as :meth:`NamedWeights.get`
    does.
    """

    def __init__(self, stored: NamedWeights, name: str, shape: tuple[int, ...]) -> None:
        self.stored = stored
        self.name = name
        self.shape = shape

    def __getitem__(self, index: EllipsisType | tuple[slice, ...]) -> Tensor:
        return self.stored.get(self.name, index)


def write_tensors(named: Iterable[tuple[str, Tensor]], path: Path, writer: bool) -> None:
    """Write a stream of tensors as safetensors files with an index.

    Ranks with ``writer`` False only iterate over the stream, because producing it may be a
    collective operation. For the same reason, the writer raises an error such as a full disk only
    at the end of the stream. Until everything is written, a folder with several files has no index,
    so it cannot be loaded.
    """
    shards: list[tuple[str, list[str]]] = []
    pending: dict[str, Tensor] = {}
    total = 0
    size = 0
    failure: Exception | None = None
    if writer:
        try:
            path.mkdir(parents=True, exist_ok=True)
            # an older export would else be loaded with some of the new files
            (path / INDEX).unlink(missing_ok=True)
        except OSError as error:
            failure = error

    def flush() -> None:
        file = f"model-{len(shards) + 1:05d}.safetensors"
        save_file(pending, str(path / file), metadata={"format": "pt"})
        shards.append((file, list(pending)))
        pending.clear()

    for name, tensor in named:
        if not writer or failure is not None:
            continue
        nbytes = tensor.numel() * tensor.element_size()
        if pending and size + nbytes > SHARD_BYTES:
            try:
                flush()
            except (OSError, SafetensorError) as error:
                failure = error
                continue
            size = 0
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += nbytes
        total += nbytes
    if failure is not None:
        raise failure
    if not writer:
        return
    flush()
    if len(shards) == 1:
        (path / shards[0][0]).rename(path / "model.safetensors")
    # The files of an older export that had another number of them: transformers would load the
    # single one in spite of the index, and engines may read all files of a folder without an index.
    files = {file for file, _ in shards} if len(shards) > 1 else {"model.safetensors"}
    for old in path.iterdir():
        if re.fullmatch(r"model(-\d{5})?\.safetensors", old.name) and old.name not in files:
            old.unlink()
    weight_map = {name: file for file, names in shards for name in names}
    if len(shards) > 1:
        (path / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        )


def is_finite(tensor: Tensor) -> bool:
    """Whether all values of a float tensor are finite. True for other dtypes."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    total = tensor.sum(dtype=torch.float32 if tensor.element_size() < 8 else None)
    # a sum of finite values can overflow
    return bool(torch.isfinite(total)) or bool(torch.isfinite(tensor).all())


def _read_config(folder: Path) -> dict[str, object]:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_bytes()) if file.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} is not a JSON object")
    return config


def _nominal_dtype(config: Mapping[str, object]) -> torch.dtype:
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        named = str(part.get("dtype") or part.get("torch_dtype"))
        if named in ("float32", "float16", "bfloat16"):
            dtype: torch.dtype = getattr(torch, named)
            return dtype
    return torch.bfloat16
