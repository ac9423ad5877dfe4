"""A process group beside the default one, as trainers and SGLang engines build it for weight updates."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def join_group(
    address: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout: timedelta
) -> ProcessGroup:
    """Rendezvous at ``tcp://address:port`` and return the group; all members must call this together.

    The store's keys are prefixed by ``name``, which is how SGLang's ``init_custom_process_group`` does it, so
    members of either kind meet.
    """
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    url = f"tcp://{address}:{port}"
    store, rank, world_size = next(rendezvous(url, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=cast(Any, name),  # the alias of its type differs between torch versions
        backend_options=None,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group
