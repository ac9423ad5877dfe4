"""Read the weights of a checkpoint that Megatron-LM wrote (``--ckpt-format torch_dist``). Megatron
is not needed.

Its tensors have the names of Megatron's layers with Transformer Engine, which differ from those of
the weight maps (:mod:`slime.plugins.megatron.maps`) in these ways:

- The layers of a dense model are stacked: ``decoder.layers.self_attention.linear_qkv.weight`` has
  one more dimension, the layer. Other models have the number of the layer in the name.
- A norm can be part of the linear layer after it: ``linear_qkv.layer_norm_weight``.
- Experts are stacked in the same way as layers, or have their number in the name.
- Embeddings are padded by rows that the model does not use.

Tensors of the optimizer and extra states are never read.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from slime.backends.tensor_index import require_tensors
from slime.config.run import other_folder
from slime.models.shards import ModelError, local_folder, read_headers, shorten
from slime.models.stored import NamedWeights, StoredWeights
from slime.plugins.megatron.maps import Layout, Vocabulary
from slime.plugins.megatron.maps.family import (
    Entry,
    Family,
    HfConfig,
    Settings,
    family_of,
    text_config,
)

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OTHER_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attn_bda.norm.weight": "post_self_attn_layernorm.weight",
    "mlp_bda.norm.weight": "post_mlp_layernorm.weight",
}
"""The name of a parameter in the weight maps, after the layer -> its name in checkpoints of
Megatron-LM.
"""
_EXPERTS = {"mlp.experts.gate_up": "linear_fc1", "mlp.experts.down": "linear_fc2"}


@dataclass(frozen=True)
class Place:
    """A stored tensor, or the part of it at ``index`` in its first dimensions (layer, expert)."""

    name: str
    index: tuple[int, ...] = ()


@dataclass(frozen=True)
class Parameter:
    """A parameter of one layer, or that of one expert in it: its map, and the stored tensors that
    it consists of.
    """

    entry: Entry
    places: tuple[Place, ...]


class MegatronLmWeights(NamedWeights):
    """The weights of a checkpoint of Megatron-LM under their Hugging Face names. The last parameter
    that was read, of one layer and one expert, stays in memory."""

    def __init__(self, folder: Path, family: Family, settings: Settings) -> None:
        """Read only the index.

        Args:
            folder: A folder with ``.metadata`` and ``*.distcp``
                (:func:`slime.config.run.other_folder`).
            family: The weight map of the model.
            settings: The shape of the model; ``vocab_size`` is the number of rows of the embeddings
                without padding.

        Raises:
            ModelError: Tensors are missing, or do not fit the shape. The message names them.
            UnsafeMetadataError: The index could execute code.
        """
        self.folder = folder
        require_tensors(folder, only=False)
        self._reader = dcp.FileSystemReader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        every = metadata.state_dict_metadata.items()
        self.stored = {
            name: tensor for name, tensor in every if isinstance(tensor, TensorStorageMetadata)
        }
        self._check_layers(settings["num_layers"])
        self._of: dict[str, tuple[Parameter, int]] = {}
        """The parameter in which a Hugging Face tensor is stored, and its number among the tensors
        there.
        """
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._split_shapes: dict[tuple[Layout, tuple[int, ...]], list[tuple[int, ...]]] = {}
        self._add(family, settings)
        self._lock = threading.Lock()
        self._last = (-1, [torch.empty(0)])

    def _check_layers(self, layers: int) -> None:
        indexed = {int(found[1]) for name in self.stored if (found := _LAYER.fullmatch(name))}
        stacked = {
            tensor.size[0]
            for name, tensor in self.stored.items()
            if name.startswith("decoder.layers.") and not _LAYER.fullmatch(name) and tensor.size
        }
        counts = stacked | ({max(indexed) + 1} if indexed else set())
        if counts - {layers}:
            numbers = " and ".join(map(str, sorted(counts)))
            raise ModelError(
                f"{self.folder} has {numbers} layers, but the model of --hf-checkpoint has {layers}"
            )

    def _add(self, family: Family, settings: Settings) -> None:
        missing: list[str] = []
        wrong: list[str] = []
        if any(entry.is_stacked for entry in family.entries(settings)):
            raise ModelError(
                f"{self.folder} was written by Megatron-LM, whose names for {family.name} slime "
                "does not know: load the Hugging Face checkpoint, or convert that with "
                "tools/convert_hf_to_torch_dist.py"
            )
        # All problems are collected, so that one message names them.
        for entry in family.entries(settings):
            for expert in range(entry.experts) if entry.experts else (None,):
                names = [
                    name if expert is None else name.format(expert=expert) for name in entry.hf
                ]
                tried = list(_spellings(entry, expert))
                places = next(
                    (
                        places
                        for places in tried
                        if all(place.name in self.stored for place in places)
                    ),
                    None,
                )
                if places is None:
                    spelled = sorted({place.name for places in tried for place in places}, key=len)
                    missing.append(f"{' + '.join(names)} (stored as {' or '.join(spelled[:4])})")
                    continue
                try:
                    shapes = self._shapes_of(entry, places)
                except (RuntimeError, ValueError, IndexError) as error:
                    wrong.append(
                        f"{places[0].name} {tuple(self.stored[places[0].name].size)}: {error}"
                    )
                    continue
                parameter = Parameter(entry, places)
                for number, (name, shape) in enumerate(zip(names, shapes, strict=True)):
                    self._of[name] = (parameter, number)
                    self._shapes[name] = shape
        if missing:
            raise ModelError(
                f"checkpoint {self.folder} does not fit the model of --hf-checkpoint: it lacks "
                f"{len(missing)} parameters: {shorten(missing, 3)}"
            )
        if wrong:
            raise ModelError(
                f"checkpoint {self.folder} does not fit the model of --hf-checkpoint: "
                f"{shorten(wrong, 3)}"
            )

    def _shapes_of(self, entry: Entry, places: Sequence[Place]) -> list[tuple[int, ...]]:
        sizes = [tuple(self.stored[place.name].size) for place in places]
        if any(
            index >= size
            for place, full in zip(places, sizes, strict=True)
            for index, size in _pairs(place, full)
        ):
            raise ValueError(f"it has no part {places[0].index}")
        whole = [size[len(place.index) :] for place, size in zip(places, sizes, strict=True)]
        shape = (sum(size[0] for size in whole), *whole[0][1:])
        if isinstance(entry.layout, Vocabulary) and shape[0] < entry.layout.rows:
            raise ValueError(
                f"it has {shape[0]} rows, but the vocabulary has {entry.layout.rows} tokens"
            )
        key = entry.layout, shape
        if key not in self._split_shapes:
            parts = _split(entry, torch.empty(shape, device="meta"))
            self._split_shapes[key] = [tuple(part.shape) for part in parts]
        return self._split_shapes[key]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise KeyError(f"{self.folder} has no tensor {name!r}; it has {len(self._shapes)}")
        return self._shapes[name]

    def _dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = self.stored[self._of[name][0].places[0].name].properties.dtype
        return dtype

    def dtype_of(self, name: str) -> str:
        return str(self._dtype(name)).removeprefix("torch.")

    def is_float(self, name: str) -> bool:
        return self._dtype(name).is_floating_point

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def where(self, name: str) -> str:
        return self._of[name][0].places[0].name

    def get(self, name: str, index: EllipsisType | tuple[slice, ...] = ...) -> Tensor:
        """Read one weight, or a part of it, in the dtype of the checkpoint.

        Raises:
            KeyError: There is no weight with this name.
            ModelError: A file is missing or damaged, or the weight has values that are not finite.
        """
        self.shape(name)  # raises KeyError
        parameter, number = self._of[name]
        with self._lock:  # transformers reads on several threads
            if self._last[0] != id(parameter):
                self._last = (-1, [])  # frees the memory before the next parameter is read
                full = torch.cat([self._read(place) for place in parameter.places])
                self._last = (id(parameter), _split(parameter.entry, full))
            part = self._last[1][number]
        return self.require_finite(name, part[index]).clone(memory_format=torch.contiguous_format)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights, one at a time."""
        for name in self._of:
            yield name, self.get(name)

    def _read(self, place: Place) -> Tensor:
        """Read the chunks of the files that a part of a stored tensor consists of, one at a
        time.
        """
        stored = self.stored[place.name]
        lead = len(place.index)
        size = torch.Size([*(1,) * lead, *stored.size[lead:]])
        target = torch.empty(size, dtype=stored.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size([*place.index, *(0,) * (len(size) - lead)]), size)
        items = create_read_items_for_chunk_list(place.name, stored, [wanted])
        if sum(item.lengths.numel() for item in items) != target.numel():
            raise ModelError(
                f"{place.name} in {self.folder} is not complete: the checkpoint is damaged"
            )
        planner = _IntoTensor(target)
        for item in items:
            try:
                self._reader.read_data(LoadPlan([item]), planner)
            except (OSError, RuntimeError, ValueError, EOFError) as error:
                raise ModelError(
                    f"{place.name} in {self.folder} cannot be read: {error}"
                ) from error
        return target.reshape(size[lead:])


class _IntoTensor(dcp.DefaultLoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__(flatten_state_dict=False)
        self.target = target

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.target


def _pairs(place: Place, size: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(place.index, size, strict=False)  # the size has more dimensions


def _split(entry: Entry, full: Tensor) -> list[Tensor]:
    return entry.layout.split(full.reshape(entry.layout.full_shape(full.shape, 1)))


def _spellings(entry: Entry, expert: int | None) -> Iterator[tuple[Place, ...]]:
    """Yield the places at which checkpoints have a parameter, the indexed layer before the stacked
    one.
    """
    found = _LAYER.fullmatch(entry.megatron)
    if found is None:
        yield (Place(entry.megatron),)
        return
    layer = int(found[1])
    rest = found[2]
    if expert is not None:
        in_layer = list(_spellings_of_expert(rest, expert))
    else:
        in_layer = [(Place(name),) for name in (rest, _OTHER_NAMES.get(rest)) if name]
    for places in in_layer:
        yield tuple(Place(f"decoder.layers.{layer}.{place.name}", place.index) for place in places)
    for places in in_layer:
        yield tuple(
            Place(f"decoder.layers.{place.name}", (layer, *place.index)) for place in places
        )


def _spellings_of_expert(rest: str, expert: int) -> Iterator[tuple[Place, ...]]:
    """Yield the names of an expert's matrix: those of grouped experts, of single ones, and with
    gate and up apart.
    """
    linear = _EXPERTS[rest]
    yield (Place(f"mlp.experts.experts.{linear}.weight", (expert,)),)
    yield (Place(f"mlp.experts.experts.{linear}.weight{expert}"),)
    for one in (f"mlp.experts.experts.{expert}", f"mlp.experts.local_experts.{expert}"):
        yield (Place(f"{one}.{linear}.weight"),)
        yield (Place(f"{one}.{linear}.weight_w"), Place(f"{one}.{linear}.weight_v"))
    yield (Place(f"mlp.experts.{linear}.weight{expert}"),)
    yield (Place(rest, (expert,)),)  # of slime's own checkpoints


def open_megatron_lm(
    path: str, hf_checkpoint: str, model_name: str | None = None, trust_remote_code: bool = False
) -> MegatronLmWeights:
    """Return the weights of a checkpoint of Megatron-LM.

    Args:
        path: The folder of one iteration, or the folder with the tracker file.
        hf_checkpoint: The folder or hub id of the model, whose config.json gives the shape.
        model_name: ``--model-name``.

    Raises:
        ModelError: Tensors are missing or do not fit the shape, or there is no weight map for this
            family of models.
    """
    folder = other_folder(path)
    assert folder is not None, "the caller has found it"
    config = text_config(hf_checkpoint, trust_remote_code)
    try:
        return read_megatron_lm(folder, family_of(config, model_name), config.to_dict())
    except ModelError:
        raise
    except ValueError as error:  # no map, or an index that could execute code
        raise ModelError(
            f"{path} was written by Megatron-LM and cannot be read: {error}"
        ) from error


def read_megatron_lm(folder: Path, family: Family, config: HfConfig) -> MegatronLmWeights:
    """Return the weights in a folder of Megatron-LM under their Hugging Face names.

    Args:
        folder: As :func:`slime.config.run.other_folder` finds it.
        config: The content of the model's config.json.
    """
    return MegatronLmWeights(folder, family, family.settings_of(config))


def differing_shapes(weights: NamedWeights, hf_checkpoint: str) -> list[str]:
    """Describe the first tensors whose shapes differ from those in the files of ``hf_checkpoint``,
    if they are here.
    """
    folder = local_folder(hf_checkpoint)
    if folder is None or not read_headers(folder):
        return []
    expected = StoredWeights(folder).shapes()
    wrong = [
        f"{name} {shape} instead of {expected[name]}"
        for name, shape in weights.shapes().items()
        if expected.get(name, shape) != shape
    ]
    return (
        [f"{weights.folder} has another shape than --hf-checkpoint: {shorten(wrong, 3)}"]
        if wrong
        else []
    )
