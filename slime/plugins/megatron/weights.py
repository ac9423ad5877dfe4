"""Load Megatron parameters from Hugging Face tensors, and gather them to Hugging Face tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor
from torch.distributed import ProcessGroup

from slime.backends.collectives import gather_objects
from slime.models.shards import ModelError
from slime.models.stored import NamedWeights
from slime.plugins.megatron import groups
from slime.plugins.megatron.core import MegatronError
from slime.plugins.megatron.groups import Piece, batches, tensor_group, whole
from slime.plugins.megatron.maps import Source
from slime.plugins.megatron.maps.family import Entry, Family, Settings
from slime.plugins.megatron.model import PolicyModel

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
VALUE_HEAD = (OUTPUT, "output_layer.bias")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


class Held(NamedTuple):
    """The pipeline rank that has the parameter of an entry, and the shape and dtype of this
    parameter there.
    """

    stage: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class ModelWeights:
    """All weights of the model chunks on this rank, by their names in the whole model."""

    def __init__(
        self, chunks: Sequence[PolicyModel], family: Family, settings: Settings, valued: bool
    ) -> None:
        self.tied = not valued and not settings["untie_embeddings_and_output_weights"]
        self.entries: dict[str, Entry] = {
            entry.megatron: entry for entry in family.entries(settings)
        }
        output = self.entries.pop(OUTPUT, None) if valued else None
        self._others = [[name] for name in VALUE_HEAD] if valued else []
        self._others += [] if output is None else [list(output.hf)]
        self.local: dict[str, Tensor] = {}
        self.duplicates: dict[str, Tensor] = {}
        """The output embedding on the last stage, if it is tied to the input embedding on the
        first.
        """
        self.own: dict[str, Tensor] = {}
        """The value head of a critic or a reward model, which no checkpoint that is read has."""
        for chunk in chunks:
            self._add_chunk(chunk, valued)
        # The optimizer, which is created later, reads these attributes when it computes the norm of
        # all gradients.
        self._mark_parallel()
        self.held = self._who_holds()

    def _add_chunk(self, chunk: PolicyModel, valued: bool) -> None:
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        buffers = [
            (name, x)
            for name, x in chunk.named_buffers()
            if name.endswith("expert_bias") and x is not None
        ]
        for name, tensor in [*chunk.named_parameters(), *buffers]:
            whole = global_name(name, numbers)
            if valued and whole.startswith("output_layer."):
                self.own[whole] = tensor
            elif self.tied and whole == OUTPUT:
                self.duplicates[EMBEDDING] = tensor
            elif whole in self.entries:
                self.local[whole] = tensor
            else:
                raise MegatronError(
                    f"the model's weight map has no entry for parameter {whole} "
                    f"{tuple(tensor.shape)}"
                )

    def _mark_parallel(self) -> None:
        """Mark the parameters that are divided among tensor-parallel ranks.

        Megatron does this when it initializes weights, which is disabled here. The norm of all
        gradients counts parameters without this mark on one tensor-parallel rank only.
        """
        for name, tensor in [*self.local.items(), *self.duplicates.items()]:
            entry = self.entries[name]
            if (
                entry.layout.axis is not None
                and not entry.experts
                and not hasattr(tensor, "tensor_model_parallel")
            ):
                set_tensor_model_parallel_attributes(tensor, True, entry.layout.axis, 1)

    def _who_holds(self) -> dict[str, Held]:
        held = who_holds(self.local)
        missing = [name for name in self.entries if name not in held]
        if missing:
            raise MegatronError(
                f"the model has no parameters for these entries of its weight map: {missing[:5]}"
            )
        return held

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return all tensors on this rank that are trained or saved, in a fixed order."""
        return [
            *sorted(self.local.items()),
            *((f"duplicate.{name}", x) for name, x in self.duplicates.items()),
            *sorted(self.own.items()),
        ]

    def hf_names(self, name: str) -> list[str]:
        """Return the Hugging Face names of the tensors in a parameter; for a value head, its own
        name.
        """
        name = name.removeprefix("duplicate.")
        if name not in self.entries:
            return [name]
        entry = self.entries[name]
        experts = range(entry.experts) if entry.experts else (0,)
        return list(
            dict.fromkeys(hf.format(expert=expert) for expert in experts for hf in entry.hf)
        )

    def all_hf_names(self) -> list[list[str]]:
        """Return :meth:`hf_names` of all parameters of the model, equal on all pipeline stages. For
        a critic, they contain the output of the actor, because flags that select parameters are for
        both."""
        return [self.hf_names(name) for name in self.entries] + self._others

    # --- from a checkpoint -----------------------------------------------------------------------

    @torch.no_grad()
    def load(self, folder: NamedWeights) -> None:
        """Load this rank's parameters. This is a collective operation.

        One of the data-parallel replicas of a parameter reads it and broadcasts it to the others.
        Of each tensor, it reads only the rows or columns that belong to the parameter.

        Raises:
            KeyError, ValueError: A tensor is missing, has another shape or is not of a float type.
            ModelError: Another rank could not read its part. The message is that of the other rank.
        """
        targets = [*self.local.items(), *self.duplicates.items()]
        groups = [_replicas(self.entries[name]) for name, _ in targets]
        readers = _readers(groups, [tensor.nbytes for _, tensor in targets])
        failure: Exception | None = None
        try:
            for (name, tensor), group, reader in zip(targets, groups, readers, strict=True):
                if reader == group.rank():
                    self._read(folder, name, tensor)
        # of any type: the other ranks must not wait for a broadcast that never comes
        except Exception as error:
            failure = error
        _raise_together(failure)
        for (_, tensor), group, reader in zip(targets, groups, readers, strict=True):
            if group.size() > 1:
                source = dist.get_process_group_ranks(group)[reader]
                dist.broadcast(tensor.detach().view(-1).view(torch.uint8), src=source, group=group)

    def _read(self, folder: NamedWeights, name: str, tensor: Tensor) -> None:
        """Load this rank's part of the checkpoint's tensors into one parameter."""
        entry = self.entries[name].found_in(folder)
        group = tensor_group(entry)
        for hf in entry.hf if entry.is_stacked else self.hf_names(name):
            if hf in folder and not folder.is_float(hf):
                raise ModelError(
                    f"{hf!r} in {folder.folder} is {folder.dtype_of(hf)}, which is not a float type"
                )
        first = mpu.get_expert_model_parallel_rank() * tensor.shape[0] if entry.experts else 0
        # What has all experts is read once, because a quantized tensor is always read as a whole.
        mine = (slice(first, first + tensor.shape[0]),)
        stacked = [folder[hf][mine] for hf in entry.hf] if entry.is_stacked else []
        for j, target in enumerate(tensor if entry.experts else [tensor]):
            stored: Sequence[Source] = [x[j] for x in stacked] or [
                folder[x.format(expert=first + j)] for x in entry.hf
            ]
            try:
                part = entry.layout.part(stored, group.rank(), group.size())
            except ModelError:  # its message already has the name of the tensor
                raise
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            _fill(name, target, part)

    # --- to a checkpoint -------------------------------------------------------------------------

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full Hugging Face tensors on every rank; see :func:`gather`."""
        return gather(self.entries, self.local, self.held)

    def score_weight(self, like: Tensor, hidden_size: int) -> Tensor:
        """Return the weight of the value head, ``[1, hidden]``, on every rank, in the dtype and on
        the device of ``like``. This is a collective operation.
        """
        name = "output_layer.weight"
        weight = self.own[name].detach() if name in self.own else like.new_empty(1, hidden_size)
        groups.broadcast_from_last_stage([weight])
        return weight


def global_name(name: str, numbers: Sequence[int]) -> str:
    """Return the name in the whole model of a parameter or module of a chunk whose layers have
    these numbers.
    """
    return _LAYER.sub(lambda m: f"decoder.layers.{numbers[int(m[1])]}.", name)


def who_holds(local: Mapping[str, Tensor]) -> dict[str, Held]:
    """Return the parameters of all pipeline stages, given those of this rank. This is a collective
    operation.
    """
    mine = {name: (tuple(x.shape), x.dtype) for name, x in local.items()}
    everyones = gather_objects(mine, mpu.get_pipeline_model_parallel_group())
    return {
        name: Held(stage, *description)
        for stage, names in enumerate(everyones)
        for name, description in names.items()
    }


@torch.no_grad()
def gather(
    entries: Mapping[str, Entry], local: Mapping[str, Tensor], held: Mapping[str, Held]
) -> Iterator[tuple[str, Tensor]]:
    """Yield full Hugging Face tensors on every rank. They may share memory with the parameters.

    This is a collective operation.

    Args:
        entries: The entries of all parameters by their names in the whole model.
        local: The parameters of this rank.
        held: The result of :func:`who_holds`.
    """
    stacked: list[Tensor] = []
    for batch in batches(_pieces(entries, local, held)):
        for piece, tensors in zip(batch, whole(batch), strict=True):
            entry = piece.entry
            if piece.expert is None:
                yield from zip(entry.hf, entry.layout.split(tensors[0]), strict=True)
                continue
            count = held[entry.megatron].shape[0]
            for rank, full in enumerate(tensors):
                number = rank * count + piece.expert
                parts = entry.layout.split(full)
                if not entry.is_stacked:
                    yield from zip(
                        (hf.format(expert=number) for hf in entry.hf), parts, strict=True
                    )
                    continue
                if number == 0:
                    stacked = [part.new_empty(entry.experts, *part.shape) for part in parts]
                for target, part in zip(stacked, parts, strict=True):
                    target[number] = part
            if entry.is_stacked and piece.expert == count - 1:
                yield from zip(entry.hf, stacked, strict=True)


def _pieces(
    entries: Mapping[str, Entry], local: Mapping[str, Tensor], held: Mapping[str, Held]
) -> Iterator[Piece]:
    for name, entry in entries.items():
        stage, shape, dtype = held[name]
        mine = local.get(name)
        if not entry.experts:
            yield Piece(entry, stage, shape, dtype, mine, None)
            continue
        for j in range(shape[0]):
            yield Piece(entry, stage, shape[1:], dtype, None if mine is None else mine[j], j)


def _fill(name: str, target: Tensor, source: Tensor) -> None:
    if target.numel() != source.numel():
        raise ValueError(
            f"{name} has shape {tuple(source.shape)} in the checkpoint, but {tuple(target.shape)} "
            "in the model"
        )
    target.copy_(source.reshape(target.shape))


def _replicas(entry: Entry) -> ProcessGroup:
    """Return the group of ranks that have equal parts of a parameter.

    Its tensor-parallel ranks are not included, even if the parameter is not divided, because such
    parameters are small.
    """
    if entry.experts:
        return mpu.get_expert_data_parallel_group()
    return mpu.get_data_parallel_group(with_context_parallel=True)


def _readers(groups: Sequence[ProcessGroup], sizes: Sequence[int]) -> list[int]:
    """Choose for each parameter the rank of its group that reads it: the one with the fewest bytes
    so far.

    All ranks of a group have the same parameters in the same order, so their results are equal.
    """
    read: dict[int, list[int]] = {}
    readers = []
    for group, size in zip(groups, sizes, strict=True):
        bytes_of = read.setdefault(id(group), [0] * group.size())
        reader = bytes_of.index(min(bytes_of))
        bytes_of[reader] += size
        readers.append(reader)
    return readers


def _raise_together(failure: Exception | None) -> None:
    """Raise an error on all ranks if one of them failed. This is a collective operation."""
    found = gather_objects(
        None if failure is None else f"{type(failure).__name__}: {failure}", dist.group.WORLD
    )
    if failure is not None:
        raise failure
    for rank, message in enumerate(found):
        if message is not None:
            raise ModelError(f"rank {rank} could not read the checkpoint: {message}")
