"""Megatron parameters by their place in the whole model: filled from, and gathered to, Hugging Face tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from slime.backends.megatron.core import MegatronError
from slime.models.shards import ModelError
from slime.weights.hf_folder import HfFolder
from slime.weights.maps.family import Entry, Family, Settings

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


class Held(NamedTuple):
    """Where an entry lives: the pipeline rank, and its parameter there, as every rank must know it."""

    stage: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class ModelWeights:
    """All weights of the model chunks on this rank, by their names in the whole model."""

    def __init__(self, chunks: Sequence[nn.Module], family: Family, settings: Settings, role: str) -> None:
        self.tied = role == "actor" and not settings["untie_embeddings_and_output_weights"]
        entries = [e for e in family.entries(settings) if role == "actor" or e.megatron != OUTPUT]
        self.entries: dict[str, Entry] = {entry.megatron: entry for entry in entries}
        self.local: dict[str, Tensor] = {}
        self.duplicates: dict[str, Tensor] = {}
        """The output embedding of the last stage where it is the input's of the first."""
        self.own: dict[str, Tensor] = {}
        """A critic's head: it has no counterpart in a checkpoint."""
        for chunk in chunks:
            self._add_chunk(chunk, role)
        self._mark_parallel()
        self.held = self._who_holds()

    def _add_chunk(self, chunk: Any, role: str) -> None:
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        buffers = [(name, x) for name, x in chunk.named_buffers() if name.endswith("expert_bias") and x is not None]
        for name, tensor in [*chunk.named_parameters(), *buffers]:
            whole = _LAYER.sub(lambda m: f"decoder.layers.{numbers[int(m[1])]}.", name)
            if role == "critic" and whole.startswith("output_layer."):
                self.own[whole] = tensor
            elif self.tied and whole == OUTPUT:
                self.duplicates[EMBEDDING] = tensor
            elif whole in self.entries:
                self.local[whole] = tensor
            else:
                raise MegatronError(f"parameter {whole} {tuple(tensor.shape)} has no entry in the model's weight map")

    def _mark_parallel(self) -> None:
        """Megatron marks what is cut over tensor parallel ranks when it initialises weights, which it does not here;
        the norm of all gradients counts only once what is not marked."""
        for name, tensor in [*self.local.items(), *self.duplicates.items()]:
            entry = self.entries[name]
            if entry.layout.axis is not None and not entry.experts and not hasattr(tensor, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(tensor, True, entry.layout.axis, 1)

    def _who_holds(self) -> dict[str, Held]:
        mine = {name: (tuple(x.shape), x.dtype) for name, x in self.local.items()}
        everyones = _gather_objects(mine, mpu.get_pipeline_model_parallel_group())
        held = {
            name: Held(stage, *description)
            for stage, names in enumerate(everyones)
            for name, description in names.items()
        }
        missing = [name for name in self.entries if name not in held]
        if missing:
            raise MegatronError(f"the model has no parameters for {missing[:5]} of its weight map")
        return held

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Everything on this rank that is trained or saved, in a fixed order."""
        return [
            *sorted(self.local.items()),
            *((f"duplicate.{name}", x) for name, x in self.duplicates.items()),
            *sorted(self.own.items()),
        ]

    def hf_names(self, name: str) -> list[str]:
        """Hugging Face names behind a parameter (its own name for a critic's head)."""
        name = name.removeprefix("duplicate.")
        if name not in self.entries:
            return [name]
        entry = self.entries[name]
        experts = range(entry.experts) if entry.experts else (0,)
        return [hf.format(expert=expert) for expert in experts for hf in entry.hf]

    # --- from a checkpoint -----------------------------------------------------------------------

    @torch.no_grad()
    def load(self, folder: HfFolder) -> None:
        """Fill this rank's parameters; reads only what they need.

        Raises:
            KeyError, ValueError: a tensor is missing, has another shape or is not of a float type; names it.
        """
        for name in (*self.local, *self.duplicates):
            for hf in self.hf_names(name):
                if hf in folder and not folder.is_float(hf):
                    raise ModelError(f"{hf!r} in {folder.folder} is {folder.plain[hf].dtype}, which is no float type")
        for name, tensor in [*self.local.items(), *self.duplicates.items()]:
            entry = self.entries[name]
            if not entry.experts:
                _fill(name, tensor, self._slice(entry, [folder.get(hf) for hf in entry.hf]))
                continue
            first = mpu.get_expert_model_parallel_rank() * tensor.shape[0]
            for j in range(tensor.shape[0]):
                tensors = [folder.get(hf.format(expert=first + j)) for hf in entry.hf]
                _fill(name, tensor[j], self._slice(entry, tensors))

    def _slice(self, entry: Entry, tensors: list[Tensor]) -> Tensor:
        full = entry.layout.join(tensors)
        axis = entry.layout.axis
        if axis is None:
            return full
        group = _tensor_group(entry)
        if full.shape[axis] % group.size():
            raise ValueError(
                f"{entry.megatron}: {full.shape[axis]} cannot be cut into {group.size()} tensor parallel parts"
            )
        return full.chunk(group.size(), axis)[group.rank()]

    # --- to a checkpoint -------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face tensors, whole, on every rank; a collective. They may alias the live weights."""
        for name, entry in self.entries.items():
            held = self.held[name]
            if not entry.experts:
                full = self._whole(entry, held, self.local.get(name), list(held.shape))
                yield from zip(entry.hf, entry.layout.split(full), strict=True)
                continue
            count, *shape = held.shape
            for j in range(count):  # one expert of every expert-parallel rank at a time
                mine = self.local[name][j] if name in self.local else None
                for rank, full in enumerate(self._whole_experts(entry, held, mine, shape)):
                    names = (hf.format(expert=rank * count + j) for hf in entry.hf)
                    yield from zip(names, entry.layout.split(full), strict=True)

    def _whole(self, entry: Entry, held: Held, mine: Tensor | None, shape: list[int]) -> Tensor:
        """The full array on every rank: gathered over tensor parallel ranks, then sent to the other stages."""
        group = _tensor_group(entry)
        full_shape = _full_shape(entry, shape, group.size())
        if mine is None:
            return _from_stage(torch.empty(full_shape, dtype=held.dtype, device=_device()), held.stage)
        axis = entry.layout.axis
        part_shape = list(full_shape)
        if axis is not None:
            part_shape[axis] //= group.size()
        part = mine.detach().reshape(part_shape)
        full = part if axis is None or group.size() == 1 else torch.cat(_gather_tensors(part, group), axis)
        return _from_stage(full, held.stage)

    def _whole_experts(self, entry: Entry, held: Held, mine: Tensor | None, shape: list[int]) -> list[Tensor]:
        group = mpu.get_expert_model_parallel_group()
        if group.size() == 1:
            return [self._whole(entry, held, mine, shape)]
        # Every rank of the group holds other experts of the same shape: whole ones first, then all of them.
        tensor_group = _tensor_group(entry)
        full_shape = [group.size(), *_full_shape(entry, shape, tensor_group.size())]
        if mine is None:
            return list(_from_stage(torch.empty(full_shape, dtype=held.dtype, device=_device()), held.stage).unbind(0))
        part_shape = full_shape[1:]
        axis = entry.layout.axis
        assert axis is not None
        part_shape[axis] //= tensor_group.size()
        part = mine.detach().reshape(part_shape)
        whole = part if tensor_group.size() == 1 else torch.cat(_gather_tensors(part, tensor_group), axis)
        return list(_from_stage(torch.stack(_gather_tensors(whole, group)), held.stage).unbind(0))


def _full_shape(entry: Entry, shape: list[int], tp: int) -> list[int]:
    return entry.layout.full_shape(shape, tp)


def _tensor_group(entry: Entry) -> Any:
    return mpu.get_expert_tensor_parallel_group() if entry.experts else mpu.get_tensor_model_parallel_group()


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _fill(name: str, target: Tensor, source: Tensor) -> None:
    if target.numel() != source.numel():
        raise ValueError(
            f"{name}: the checkpoint gives shape {tuple(source.shape)}, the model has {tuple(target.shape)}"
        )
    target.copy_(source.reshape(target.shape))


def _gather_tensors(tensor: Tensor, group: Any) -> list[Tensor]:
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return parts


def _gather_objects(value: Any, group: Any) -> list[Any]:
    if group.size() == 1:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _from_stage(tensor: Tensor, stage: int) -> Tensor:
    group = mpu.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return tensor
    tensor = tensor.contiguous()
    dist.broadcast(tensor, src=dist.get_process_group_ranks(group)[stage], group=group)
    return tensor
