"""Which weights of a checkpoint are stored as 8-bit floats for the engines, and what their
config.json says of it.

The weights are those of the projections in attention, MLP and experts, as in published FP8
checkpoints; embeddings, ``lm_head``, norms, biases and routers keep their dtype. For SGLang with
one scale per block, a projection whose shape does not fit the blocks on every tensor-parallel rank
keeps its dtype as well, together with those that SGLang fuses with it.
Imports no torch.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Granularity = Literal["block", "channel", "tensor"]

BLOCK = 128
"""Rows and columns that share a scale with the granularity ``block``."""
_PROJECTION = re.compile(
    r"^(?P<layer>(?:.+\.)?layers\.\d+\.)(?:.+\.)?(?P<name>[qkvo]_proj|gate_proj|up_proj|down_proj)\.weight$"
)
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that SGLang keeps in one tensor."""
_BY_COLUMNS = ("o_proj", "down_proj")
"""Projections whose columns, and not rows, are divided among tensor-parallel ranks."""


@dataclass(frozen=True)
class Fp8Format:
    """How weights are quantized.

    Attributes:
        granularity: What shares a scale: blocks of 128 × 128 values, the rows (output channels), or
            the whole tensor.
        ranks: The number of tensor-parallel ranks of an SGLang server, whose layers and checksums
            need shapes that the blocks divide on every rank. None for engines that take any shape.
        key_value_heads: If there are fewer key-value heads than ranks, several ranks have the same
            head.
    """

    granularity: Granularity = "block"
    ranks: int | None = None
    key_value_heads: int = 1

    @property
    def scale_ending(self) -> str:
        """What is appended to the name of a weight to name its scales."""
        return "_scale_inv" if self.granularity == "block" else "_scale"


@dataclass(frozen=True)
class Fp8Layout:
    """The weights of one checkpoint that are quantized.

    Attributes:
        names: The names of the weights.
        kept: The names of the projections (without ``.weight``) that keep their dtype.
    """

    format: Fp8Format
    names: frozenset[str]
    kept: tuple[str, ...]

    def quantization_config(self) -> dict[str, object]:
        """Return the ``quantization_config`` of a checkpoint with these weights, as SGLang and
        transformers read it.
        """
        kept = ["lm_head", *self.kept]
        if self.format.granularity == "channel":
            weights = {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            }
            inputs = {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            }
            group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
            return {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"group_0": group},
                "ignore": kept,
            }
        config: dict[str, object] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "modules_to_not_convert": kept,
        }
        return config | (
            {"weight_block_size": [BLOCK, BLOCK]} if self.format.granularity == "block" else {}
        )


def fp8_layout(shapes: Mapping[str, Sequence[int]], how: Fp8Format) -> Fp8Layout:
    """Choose the weights to quantize.

    Args:
        shapes: The shapes of all weights by their names in the checkpoint.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name, shape in shapes.items():
        if len(shape) == 2 and _PROJECTION.match(name):
            groups[_group(name)].append(name)
    fitting: set[str] = set()
    kept: list[str] = []
    for names in groups.values():
        if all(_fits(name, shapes[name], how, len(names) > 1) for name in names):
            fitting.update(names)
        else:
            kept += [name.removesuffix(".weight") for name in names]
    return Fp8Layout(how, frozenset(fitting), tuple(sorted(kept)))


def _group(name: str) -> str:
    """Return a key that is equal for projections that SGLang keeps in one tensor: all experts of a
    layer, or the parts of a fused projection."""
    module = name.removesuffix(".weight")
    parent, _, own = module.rpartition(".")
    if ".experts." in name:
        return name.partition(".experts.")[0]
    return next((f"{parent}.{'+'.join(parts)}" for parts in FUSED if own in parts), module)


def _fits(name: str, shape: Sequence[int], how: Fp8Format, fused: bool) -> bool:
    """Return whether blocks of 128 × 128 divide the part of every rank as SGLang's layers and
    checksums need it.
    """
    if how.granularity != "block" or how.ranks is None:
        return True
    own = name.removesuffix(".weight").rpartition(".")[2]
    rows, columns = shape
    if own in _BY_COLUMNS:
        columns = columns // how.ranks if columns % how.ranks == 0 else 0
    else:
        ranks = min(how.ranks, how.key_value_heads) if own in ("k_proj", "v_proj") else how.ranks
        rows = rows // ranks if rows % ranks == 0 else 0
        if (fused or how.ranks > 1) and (rows == 0 or rows % BLOCK):
            return False
    return columns > 0 and columns % BLOCK == 0


@functools.lru_cache(maxsize=8)
def layout_of(checkpoint: str, how: Fp8Format) -> Fp8Layout:
    """Return the layout for the weights of a Hugging Face folder or hub id. Only headers are read.

    Raises:
        ModelError: The checkpoint cannot be read.
    """
    from slime.models.shards import resolve_folder
    from slime.models.stored import StoredWeights

    return fp8_layout(StoredWeights(resolve_folder(checkpoint)).shapes(), how)
