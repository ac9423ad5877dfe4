"""Receive tensors that the trainer broadcasts: join its process group, and read what is announced.

Workers of other engines import this too, so it needs nothing but torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from slime.plugins.embedded.fields import BadRequest, list_of, need, one_of, take, text, whole
from slime.plugins.embedded.tensor_wire import DTYPES, MAX_TENSORS

GROUP_TIMEOUT = timedelta(seconds=120)
FLAT = "flattened_bucket"
_NAME = text(4096)


def join_group(
    address: str,
    port: int,
    rank: int,
    world_size: int,
    name: str,
    backend: str,
    timeout: timedelta = GROUP_TIMEOUT,
) -> ProcessGroup:
    """Join a process group with a rendezvous at ``tcp://address:port``. All members must call this
    at the same time.

    The keys in the store have the prefix ``name``, as in SGLang's ``init_custom_process_group``, so
    that both kinds of members can join the same group.
    """
    url = f"tcp://{address}:{port}"
    store, rank, world_size = next(rendezvous(url, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=cast(Any, name),  # the annotated type differs between versions of torch
        backend_options=None,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


class Announced(NamedTuple):
    """A tensor that rank 0 is about to broadcast."""

    name: str
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * self.shape.numel()


def announced(body: Mapping[str, object]) -> tuple[list[Announced], bool]:
    """Return the tensors that a body of ``/update_weights_from_distributed`` announces, and whether
    they come in one broadcast.
    """
    names = need(body, "names", list_of(_NAME, MAX_TENSORS))
    dtypes = need(body, "dtypes", list_of(one_of(*DTYPES), MAX_TENSORS))
    shapes = need(body, "shapes", list_of(list_of(whole(0, 2**40), 16), MAX_TENSORS))
    if not len(names) == len(dtypes) == len(shapes):
        raise BadRequest(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes must have the "
            "same number"
        )
    tensors = [
        Announced(name, DTYPES[dtype], torch.Size(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]
    flat = take(body, "load_format", one_of(FLAT), None) is not None
    if flat:
        _require_aligned(tensors)
    return tensors, flat


def receive(
    tensors: list[Announced], group: ProcessGroup, device: torch.device, flat: bool
) -> list[tuple[str, torch.Tensor]]:
    """Receive one broadcast for each tensor, in this order, or with ``flat`` one with the bytes of
    all of them, without gaps.
    """
    return (_receive_flat if flat else _receive)(tensors, group, device)


def _receive(
    announced: list[Announced], group: ProcessGroup, device: torch.device
) -> list[tuple[str, torch.Tensor]]:
    tensors = [
        (one.name, torch.empty(one.shape, dtype=one.dtype, device=device)) for one in announced
    ]
    waits = [
        torch.distributed.broadcast(tensor, src=0, group=group, async_op=True)
        for _, tensor in tensors
    ]
    for wait in waits:
        wait.wait()
    return tensors


def _require_aligned(announced: list[Announced]) -> None:
    """Check that each tensor of a buffer without gaps starts at a multiple of its element size,
    which a view needs.
    """
    offset = 0
    for name, dtype, shape in announced:
        size = dtype.itemsize
        if offset % size:
            raise BadRequest(
                f"tensor {name!r} would start at byte {offset}, which is not a multiple of {size}"
            )
        offset += size * shape.numel()


def _receive_flat(
    announced: list[Announced], group: ProcessGroup, device: torch.device
) -> list[tuple[str, torch.Tensor]]:
    sizes = [one.nbytes for one in announced]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    torch.distributed.broadcast(flat, src=0, group=group)
    parts = zip(announced, flat.split(sizes), strict=True)
    return [(one.name, part.view(one.dtype).view(one.shape)) for one, part in parts]
