"""Megatron's process groups, and the sums over ranks that algorithms and metrics need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from torch.distributed import ProcessGroup

from slime.config.layout import ParallelLayout
from slime.config.seeds import derive_seed

T = TypeVar("T")


def initialize(layout: ParallelLayout, seed: int, timeout_minutes: int) -> None:
    """Create all groups of a layout. Groups of an earlier layout of this process are destroyed."""
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
    with _connected_at_first_use():
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            distributed_timeout_minutes=timeout_minutes,
            create_gloo_process_groups=False,  # for Megatron's own checkpoints of the distributed optimizer
        )
    tensor_parallel.model_parallel_cuda_manual_seed(derive_seed(seed, "megatron") % 2**31)


@contextmanager
def _connected_at_first_use() -> Iterator[None]:
    """Groups that are created in this context make their NCCL communicator at their first collective.

    Megatron creates some thirty groups per rank, of which a layout uses a few. While the default group is bound to a
    device, torch gives each of them a communicator at once, with buffers outside of torch's allocator: 7 GiB per GPU
    with two ranks on H200s.
    """
    world = torch.distributed.group.WORLD
    assert world is not None
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


def context_group() -> ProcessGroup | None:
    """Return the group of ranks that have other tokens of the same samples; None without context parallelism."""
    group = mpu.get_context_parallel_group()
    return group if group.size() > 1 else None


def broadcast_from_last_stage(tensors: list[torch.Tensor]) -> None:
    """Send tensors from the last pipeline stage to all others, which pass tensors of the same shapes."""
    group = mpu.get_pipeline_model_parallel_group()
    if group.size() == 1 or not tensors:
        return
    flat = torch.cat([x.flatten() for x in tensors])
    torch.distributed.broadcast(flat, src=mpu.get_pipeline_model_parallel_last_rank(), group=group)
    for x, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
        x.copy_(part.view_as(x))


def object_of_last_stage(value: T) -> T:
    """Return the value of the last pipeline stage on all stages."""
    group = mpu.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return value
    holder = [value]
    torch.distributed.broadcast_object_list(holder, src=mpu.get_pipeline_model_parallel_last_rank(), group=group)
    return holder[0]
