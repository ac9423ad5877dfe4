"""The positions of a rank's parameters and optimizer state in the tensors of the whole model, as
rectangles.

megatron-core's sharded state dicts give the position of each local parameter in the whole model.
The distributed optimizer has a flat range of each parameter, which consists of a few rectangles
(:func:`~slime.backends.tensor_shards.boxes`). A rank also writes only this range of the weights, so
that replicas share the work. The names of tensors are those of megatron-core's "fully reshardable"
format.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from slime.backends.tensor_shards import StoredTensors, TensorShard, boxes, share
from slime.plugins.megatron.groups import tensor_group
from slime.plugins.megatron.lora_layers import factors_of
from slime.plugins.megatron.maps.family import Entry
from slime.plugins.megatron.model import Chunk, unwrapped

STATE = "optimizer.state."
MAIN = "param"
MAIN_NAMES = (MAIN, "fp32_param")
"""Names of main parameters in checkpoints. megatron-core writes the second without the distributed
optimizer.
"""


class Place(NamedTuple):
    """The position of contiguous elements of a local tensor in a tensor of the whole model."""

    name: str
    start: int
    """The index of the first element in the flattened local tensor."""
    shape: tuple[int, ...]
    """The shape of these elements, with as many axes as the whole tensor."""
    offsets: tuple[int, ...]
    full_shape: tuple[int, ...]
    may_be_padded: bool

    def shards(
        self, flat: Tensor, base: int, start: int, end: int, prefix: str = ""
    ) -> Iterator[TensorShard]:
        """Yield the shards of the elements ``start`` to ``end`` of the flattened local tensor that
        are in this place.

        Args:
            flat: The elements of the local tensor from ``base`` on, or values that belong to them,
                such as moments.
            prefix: A prefix of the names of the shards.
        """
        numel = math.prod(self.shape)
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        for inner, sizes in boxes(
            self.shape, max(start - self.start, 0), min(end - self.start, numel)
        ):
            first = (
                self.start
                - base
                + sum(i * stride for i, stride in zip(inner, strides, strict=True))
            )
            data = flat[first : first + math.prod(sizes)].view(sizes)
            offsets = tuple(a + b for a, b in zip(self.offsets, inner, strict=True))
            yield TensorShard(
                prefix + self.name, data, offsets, self.full_shape, self.may_be_padded
            )


class Parameter(NamedTuple):
    """A tensor of the model on this rank."""

    tensor: Tensor
    places: list[Place]
    is_written: bool
    """False on all but one of the tensor- and pipeline-parallel ranks that have the same tensor."""

    def shards(
        self, flat: Tensor, base: int, start: int, end: int, prefix: str = ""
    ) -> Iterator[TensorShard]:
        for place in self.places:
            yield from place.shards(flat, base, start, end, prefix)


class Kept(NamedTuple):
    """The state that an optimizer on this rank has for the elements ``start`` to ``end`` of a
    parameter.
    """

    start: int
    end: int
    main: Tensor
    inner: torch.optim.Optimizer
    """torch's optimizer, which has the moments of ``main``."""
    is_separate: bool
    """Whether ``main`` is a float32 copy of a parameter in lower precision. Otherwise it equals the
    parameter.
    """

    def moments(self) -> dict[str, Tensor]:
        """Return the moments by name, without the count of steps."""
        state: dict[str, Any] = self.inner.state.get(self.main, {})
        return {name: x for name, x in state.items() if isinstance(x, Tensor) and name != "step"}


def parameters(chunks: Sequence[Chunk], adapter: bool = False) -> list[Parameter]:
    """Return the parameters of this rank's model chunks, and the buffers that are trained.

    Args:
        adapter: Whether to return only what is trained with an adapter (LoRA): its factors, by the
            names of their layers in transformers, and the head of a critic. Otherwise everything
            else is returned.
    """
    metadata = {
        "non_homogeneous_layers": True,
        "singleton_local_shards": False,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }
    found = []
    for chunk in chunks:
        for sharded in nested_values(unwrapped(chunk).sharded_state_dict(metadata=metadata)):
            if isinstance(sharded, ShardedTensorFactory):
                parts = list(nested_values(sharded.build()))
            elif isinstance(sharded, ShardedTensor):
                parts = [sharded]
            else:
                continue  # the extra state of a module, which no module of slime has
            if adapter and not sharded.data.requires_grad:
                continue
            places = [_place(part, sharded.data) for part in parts]
            found.append(Parameter(sharded.data, places, not any(sharded.replica_id[:-1])))
        if adapter:
            found += [_factor(factor, entry) for factor, entry in factors_of(unwrapped(chunk))]
    return found


def _factor(tensor: Tensor, entry: Entry) -> Parameter:
    """Return a factor of an adapter, which is whole on each tensor-parallel rank or divided along
    one axis. Those of experts have all experts of the model, which are divided along the first
    axis, before those of the layout."""
    group = tensor_group(entry)
    axis = entry.layout.axis
    first = 1 if entry.experts else 0
    full = [entry.experts, *tensor.shape[1:]] if entry.experts else list(tensor.shape)
    full[first:] = entry.layout.full_shape(full[first:], group.size())
    shape = list(full)
    offsets = [0] * len(full)
    if axis is not None:
        shape[first + axis] //= group.size()
        offsets[first + axis] = shape[first + axis] * group.rank()
    if entry.experts:
        shape[0] = len(tensor)
        offsets[0] = len(tensor) * mpu.get_expert_model_parallel_rank()
    place = Place(entry.megatron, 0, tuple(shape), tuple(offsets), tuple(full), may_be_padded=False)
    return Parameter(tensor, [place], is_written=axis is not None or group.rank() == 0)


def _place(part: ShardedTensor, whole: Tensor) -> Place:
    assert part.data.is_contiguous() and whole.is_contiguous(), (
        f"{part.key} is not contiguous in memory"
    )
    start, rest = divmod(part.data.data_ptr() - whole.data_ptr(), whole.element_size())
    assert 0 <= start <= whole.numel() - part.data.numel() and not rest, (
        f"{part.key} is no view of its parameter"
    )
    shape = (*(1 for _ in range(part.prepend_axis_num)), *part.local_shape)
    return Place(
        part.key, start, shape, part.global_offset, part.global_shape, part.allow_shape_mismatch
    )


def is_sharded(chained: ChainedOptimizer) -> bool:
    """Return whether the distributed optimizer is used, which has the state of each element on one
    replica only.
    """
    return any(isinstance(one, DistributedOptimizer) for one in chained.chained_optimizers)


def kept_state(chained: ChainedOptimizer) -> dict[int, Kept]:
    """Return the state that this rank's optimizers have, by the ``id`` of the parameter."""
    found = {}
    for optimizer in chained.chained_optimizers:
        if getattr(optimizer, "is_stub_optimizer", False) or optimizer.optimizer is None:
            continue
        inner = optimizer.optimizer
        for model, main, is_separate in _pairs(optimizer):
            start = 0
            end = model.numel()
            if isinstance(optimizer, DistributedOptimizer):
                own = optimizer._get_model_param_range_map(model)["param"]
                start = own.start
                end = own.end
            found[id(model)] = Kept(start, end, main, inner, is_separate)
    return found


def _pairs(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield each parameter of the model, its main parameter, and whether the main parameter has
    another dtype.
    """
    if isinstance(optimizer, DistributedOptimizer):
        groups = [(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, True)]
        groups.append((optimizer.model_fp32_groups, optimizer.shard_fp32_groups, False))
    elif hasattr(optimizer, "float16_groups"):
        groups = [(optimizer.float16_groups, optimizer.fp32_from_float16_groups, True)]
        groups.append((optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups, False))
    else:
        params = [group["params"] for group in optimizer.optimizer.param_groups]
        groups = [(params, params, False)]
    for models, mains, is_separate in groups:
        for model_group, main_group in zip(models, mains, strict=True):
            for model, main in zip(model_group, main_group, strict=True):
                yield model, main, is_separate


def written_shards(
    chunks: Sequence[Chunk],
    chained: ChainedOptimizer,
    copies: Mapping[int, Tensor] | None = None,
    with_optimizer: bool = False,
    adapter: bool = False,
) -> list[TensorShard]:
    """Return the shards that this rank writes of the weights and, if requested, of the optimizer's
    state.

    Args:
        chained: Megatron's optimizers.
        copies: The weights to write by the ``id`` of each parameter. Default: the parameters
            themselves.
        with_optimizer: Whether to return the optimizer's state, too.
        adapter: See :func:`parameters`.
    """
    kept = kept_state(chained)
    sharded = is_sharded(chained)
    shards: list[TensorShard] = []
    for parameter in parameters(chunks, adapter):
        if not parameter.is_written:
            continue
        state = kept.get(id(parameter.tensor))
        # A rank writes the range of the weights whose optimizer state it has, so that replicas
        # share the work. Frozen parameters have no such range, so they are divided evenly.
        if sharded and parameter.tensor.requires_grad:
            start, end = (state.start, state.end) if state is not None else (0, 0)
        else:
            start, end = _share(parameter.tensor)
        weights = (
            (parameter.tensor if copies is None else copies[id(parameter.tensor)]).detach().view(-1)
        )
        shards += parameter.shards(weights, 0, start, end)
        if state is None or not with_optimizer:
            continue
        tensors = state.moments() | ({MAIN: state.main} if state.is_separate else {})
        for name, tensor in tensors.items():
            flat = tensor.detach().view(-1)
            shards += parameter.shards(flat, state.start, start, end, f"{STATE}{name}.")
    return shards


def _share(tensor: Tensor) -> tuple[int, int]:
    """Return the range that this rank writes of a parameter which is equal on all its replicas."""
    is_expert = not getattr(tensor, "allreduce", True)
    group = mpu.get_expert_data_parallel_group() if is_expert else mpu.get_data_parallel_group(True)
    return share(tensor.numel(), group.rank(), group.size())


def weight_shards(chunks: Sequence[Chunk], adapter: bool) -> list[TensorShard]:
    """Return the shards of all weights on this rank, into which a checkpoint is read; ``adapter``
    as in :func:`parameters`."""
    return [
        shard
        for parameter in parameters(chunks, adapter)
        for shard in parameter.shards(
            parameter.tensor.detach().view(-1), 0, 0, parameter.tensor.numel()
        )
    ]


def state_shards(
    chunks: Sequence[Chunk], chained: ChainedOptimizer, stored: StoredTensors, adapter: bool
) -> list[TensorShard]:
    """Return the shards of the optimizer's state on this rank, into which a checkpoint is read;
    ``adapter`` as in :func:`parameters`.

    Moments are created if the checkpoint has them. If it lacks a main parameter, the weight is read
    instead.

    Raises:
        ValueError: The checkpoint lacks a main parameter, and has the weight only in lower
            precision than float32.
    """
    kept = kept_state(chained)
    shards: list[TensorShard] = []
    for parameter in parameters(chunks, adapter):
        state = kept.get(id(parameter.tensor))
        if state is None:
            continue
        sources = [name for name in MAIN_NAMES if _has(stored, parameter, f"{STATE}{name}.")]
        prefix = f"{STATE}{sources[0]}." if sources else ""
        for place in parameter.places:
            dtype = stored.dtypes.get(prefix + place.name)
            if state.is_separate and dtype not in (None, torch.float32):
                raise ValueError(
                    f"{stored.folder} has {place.name} only in {dtype}, without a float32 main "
                    "parameter"
                )
        main = state.main.detach().view(-1)
        shards += parameter.shards(main, state.start, state.start, state.end, prefix)
        for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            if not _has(stored, parameter, f"{STATE}{name}."):
                continue
            moment = state.inner.state[state.main].setdefault(
                name, torch.zeros_like(state.main.detach())
            )
            flat = moment.view(-1)
            shards += parameter.shards(flat, state.start, state.start, state.end, f"{STATE}{name}.")
    return shards


def _has(stored: StoredTensors, parameter: Parameter, prefix: str) -> bool:
    return all(prefix + place.name in stored for place in parameter.places)
