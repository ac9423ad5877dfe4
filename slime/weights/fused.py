"""Predict the checksums that SGLang computes for the weights that were sent.

SGLang keeps q, k and v of a layer in one tensor and gate and up in another, divides them among its tensor-parallel
ranks, and hashes the part of each rank. For the model families in ``FAMILIES`` the names and parts are known, so each
tensor can be compared on each rank.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.hf_config import read_config
from slime.config.hooks import module_of_file

if TYPE_CHECKING:
    import torch

    from slime.engines.sglang_api import EngineInfo

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_PLACES = {part: (whole, i) for whole, parts in _FUSED.items() for i, part in enumerate(parts)}
_HASH_FILES = ("kernels/ops/memory/gpu_tensor_hash.py", "srt/layers/multimodal.py")  # in SGLang 0.5.23 and in 0.5.15
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
_VOCABULARY_MULTIPLE = 64  # SGLang pads the vocabulary to a multiple of this
_CPU_MULTIPLE = 32  # on the CPU, SGLang pads the width of an MLP to a multiple of this


def has_predictable_checksums(model: str, info: EngineInfo, fp8: bool = False) -> bool:
    """Return whether the checksums of this engine can be predicted.

    The family must be known, and tensor parallelism must be its only parallelism. On CUDA the same version of SGLang
    must be installed here, because its hash function is used.

    Args:
        fp8: Whether this run quantizes the weights in blocks. SGLang then computes checksums of dequantized weights;
            on Blackwell GPUs it rounds the scales first, so there they are not known.
    """
    import torch

    if info.kind != "sglang" or (info.extra.get("quantization") and not fp8):
        return False
    if fp8 and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0):
        return False
    if any(int(info.extra.get(name) or 1) != 1 for name in ("pp_size", "dp_size", "ep_size")):
        return False
    config = read_config(model) or {}
    if "text_config" in config or not set(config.get("architectures") or ()) & set(FAMILIES):
        return False
    ranks = info.tensor_parallel_size
    heads, width = int(config.get("num_attention_heads") or 1), int(config.get("intermediate_size") or 1)
    groups = int(config.get("num_key_value_heads") or heads)
    if heads % ranks or (groups % ranks and ranks % groups):
        return False
    if torch.cuda.is_available():
        return width % ranks == 0 and _has_hash_of(info.version)
    return width % (_CPU_MULTIPLE * ranks) == 0


def _has_hash_of(version: str) -> bool:
    spec = importlib.util.find_spec("sglang")
    return spec is not None and metadata.version("sglang") == version and _hash_file() is not None


class FusedDigests:
    """Computes the digests of tensors with checkpoint names in the form in which the ranks of an engine hold them.

    Args:
        ranks: The number of tensor-parallel ranks of the engine.
        groups: The number of key-value heads of the model. If there are fewer than ranks, several ranks hold the same.

    Attributes:
        digests: The digests by SGLang's names (``rank<i>.<name>`` with several ranks). A fused tensor is included
            after all its parts were added.
    """

    def __init__(self, ranks: int = 1, groups: int = 1) -> None:
        self.ranks, self.groups = ranks, groups
        self.digests: dict[str, str] = {}
        self.incomplete: dict[str, dict[int, torch.Tensor]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor. The parts of a fused tensor are kept until all of them are there."""
        import torch

        if name.endswith(_VOCABULARY) and tensor.shape[0] % _VOCABULARY_MULTIPLE:  # SGLang pads it
            return
        module = name.split(".")[-2] if "." in name else ""
        if module not in _PLACES:
            self._note(name, [_part(name, tensor, rank, self.ranks) for rank in range(self.ranks)])
            return
        whole, place = _PLACES[module]
        fused = name.replace(f".{module}.", f".{whole}.")
        parts = self.incomplete.setdefault(fused, {})
        parts[place] = tensor.detach()
        if len(parts) == len(_FUSED[whole]):
            whole_parts = [parts[i] for i in range(len(parts))]
            grouped = whole == "qkv_proj"
            self._note(fused, [torch.cat(self._cut(whole_parts, rank, grouped)) for rank in range(self.ranks)])
            del self.incomplete[fused]

    def _cut(self, parts: list[torch.Tensor], rank: int, grouped: bool) -> list[torch.Tensor]:
        """Return the rows of one rank in each part. With ``grouped``, the parts after the first are key and value,
        whose heads are shared by several ranks if there are fewer groups than ranks."""
        cut = []
        for i, part in enumerate(parts):
            pieces = min(self.ranks, self.groups) if grouped and i else self.ranks
            cut.append(part.chunk(pieces)[rank * pieces // self.ranks])
        return cut

    def _note(self, name: str, held: list[torch.Tensor]) -> None:
        for rank, tensor in enumerate(held):
            self.digests[f"rank{rank}.{name}" if self.ranks > 1 else name] = digest(tensor)


def whole_frozen(frozen: Callable[[str], bool]) -> Callable[[str], bool]:
    """Return whether a tensor is frozen together with all those that SGLang keeps in one tensor with it. Only then may
    an update leave it out, because the digest of a fused tensor needs all its parts."""

    def test(name: str) -> bool:
        module = name.split(".")[-2] if "." in name else ""
        parts = _FUSED[_PLACES[module][0]] if module in _PLACES else (module,)
        return all(frozen(name.replace(f".{module}.", f".{part}.")) for part in parts)

    return test


def _part(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return the part of a tensor that one rank holds if it is not fused: some columns, some rows, or everything."""
    if ranks == 1:
        return tensor
    if name.endswith(_BY_COLUMNS):
        return tensor.chunk(ranks, 1)[rank]
    return tensor.chunk(ranks)[rank] if name.endswith(_VOCABULARY) else tensor


def key_value_heads(model: str) -> int:
    """Return the number of key-value heads of a model, given as a folder or a hub id."""
    config = read_config(model) or {}
    return int(config.get("num_key_value_heads") or config.get("num_attention_heads") or 1)


def digest(tensor: torch.Tensor) -> str:
    """Compute SGLang's checksum of one tensor: on the CPU the start of its SHA-256, on CUDA SGLang's own hash."""
    import torch

    if tensor.is_cuda:
        return f"{_cuda_hash()(tensor.detach().contiguous()):016x}"
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.data).hexdigest()[:16]


def _hash_file() -> Path | None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    files = [Path(spec.submodule_search_locations[0]) / name for name in _HASH_FILES]
    return next((file for file in files if file.is_file()), None)


@functools.cache
def _cuda_hash() -> Callable[[torch.Tensor], int]:
    """Load SGLang's hash function from its file, because importing the package would patch transformers here."""
    file = _hash_file()
    assert file is not None
    function: Callable[[torch.Tensor], int] = module_of_file("sglang_tensor_hash", file).gpu_tensor_hash
    return function
