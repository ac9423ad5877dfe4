"""Save and load the training state of all ranks, by torch's distributed checkpoint.

Tensors are stored by name, each rank's shard in a file of the rank, so another number of ranks can read them. Of
several replicas (``--fsdp-shard-size``) only one writes a tensor. The optimizer's step and the schedule come back
exactly; random-number generators where the rank existed before.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from slime.backends.bank import shard_box
from slime.backends.collectives import local
from slime.backends.saving import in_background, require_undamaged, small_files_writer
from slime.backends.tensor_shards import StoredTensors, TensorShard, write_shards
from slime.checkpoint.files import FileEntry
from slime.weights.torch_dist import META

if TYPE_CHECKING:
    from slime.backends.fsdp.backend import FsdpBackend

TENSORS = "dcp"


class _Stored(NamedTuple):
    part: Tensor
    """What this rank holds."""
    like: Tensor
    """Split over the ranks as the stored tensor is: a DTensor, or a plain tensor where every rank has all of it."""


def _state(backend: FsdpBackend, extra_copies: list[str], with_optimizer: bool) -> dict[str, _Stored]:
    named: dict[str, Tensor] = {f"model/{name}": p for name, p in backend.named_parameters}
    named |= {f"buffer/{name}": b for name, b in backend.named_buffers}
    if with_optimizer:
        named |= {f"optimizer/{name}": t for name, t in backend.optimizer.tensors().items()}
    state = {name: _Stored(local(tensor.detach()), tensor) for name, tensor in named.items()}
    parameters = dict(backend.named_parameters)
    for tag in extra_copies:
        copy = backend.bank.tensors(tag)
        state |= {f"copy/{tag}/{name}": _Stored(part, parameters[name]) for name, part in copy.items()}
    return state


def _shards(state: dict[str, _Stored]) -> list[TensorShard]:
    """This rank's part of each tensor."""
    found = []
    for name, (part, like) in state.items():
        offsets = shard_box(like)[0] if isinstance(like, DTensor) else (0,) * like.dim()
        if part.numel() or not isinstance(like, DTensor):
            found.append(TensorShard(name, part, offsets, tuple(like.shape)))
    return found


def _written_by(backend: FsdpBackend, state: dict[str, _Stored]) -> dict[str, _Stored]:
    """The tensors that this rank writes its part of. The ranks of one replica write a whole tensor; tensors are dealt
    out to the replicas so that all write about as much. Rank 0 writes what is not split."""
    sizes = [0] * (backend.world_size // backend.shard_size)
    mine = backend.rank // backend.shard_size
    found = {}
    for name, stored in sorted(state.items(), key=lambda item: -item[1].like.numel()):
        writer = 0
        if isinstance(stored.like, DTensor):
            writer = sizes.index(min(sizes))
            sizes[writer] += stored.like.numel()
        if writer == mine and (isinstance(stored.like, DTensor) or backend.rank == 0):
            found[name] = stored
    return found


def _written_shards(backend: FsdpBackend, with_optimizer: bool) -> list[TensorShard]:
    return _shards(_written_by(backend, _state(backend, sorted(backend.moving_copies), with_optimizer)))


def take_save_memory(backend: FsdpBackend, with_optimizer: bool) -> None:
    """Get the memory that the first asynchronous save copies into, while training goes on."""
    backend.save_memory.take(_written_shards(backend, with_optimizer))


def save_training_state(backend: FsdpBackend, path: Path, with_optimizer: bool) -> list[FileEntry]:
    """Write below ``path``; a collective. A half-written folder is the caller's to hide.

    Returns:
        The files that this rank wrote. With ``--async-save`` none, and ``backend.saving`` returns them.
    """
    if backend.saving is not None:  # its copies are in the memory that this save takes
        backend.saving.finish(backend.args.phase_timeout)
    if backend.rank == 0:
        path.mkdir(parents=True, exist_ok=True)
    backend.barrier()
    copies = sorted(backend.moving_copies)
    shards = _written_shards(backend, with_optimizer)
    description = _describe(backend, copies, with_optimizer) if backend.rank == 0 else None
    small = small_files_writer(path, backend.rank, _rng_state(), description)
    if not backend.args.async_save:
        return [*small(), *write_shards(shards, path / TENSORS, path)]
    copied = backend.save_memory.copied(shards)
    write = partial(write_shards, copied, path / TENSORS, path, backend.save_group)
    backend.saving = in_background(lambda: [*small(), *write()])
    return []


def _describe(backend: FsdpBackend, copies: list[str], with_optimizer: bool) -> dict[str, Any]:
    return {
        "steps": backend.optimizer.steps,
        "world_size": backend.world_size,
        "copies": copies,
        "optimizer": with_optimizer,
        "role": backend.role,
    }


def load_training_state(backend: FsdpBackend, path: Path) -> None:
    """Read what :func:`save_training_state` wrote, whatever the number of ranks was.

    ``--no-load-optim`` leaves optimizer and schedule at their start, ``--no-load-rng`` the random state, ``--finetune``
    both and the copies that a run made of its weights.

    Raises:
        FileNotFoundError: there is no such state.
        ValueError: it belongs to the other role, or its index could run code.
        SnapshotError: a file has changed since it was written.
    """
    if not (path / META).is_file():
        raise FileNotFoundError(
            f"no training state in {path}: {META} is missing; --load takes a folder that --save wrote"
        )
    meta = json.loads((path / META).read_text())
    if meta["role"] != backend.role:
        raise ValueError(f"{path} holds the state of the {meta['role']}, not of the {backend.role}")
    require_undamaged(path, backend.rank, backend.world_size)
    args = backend.args
    copies = [] if args.finetune else meta["copies"]
    for tag in copies:
        backend.bank.copy("actor", tag)  # makes room of the right shape
        backend.moving_copies.add(tag)
    state = _state(backend, copies, meta["optimizer"] and not args.no_load_optim)
    StoredTensors(path / TENSORS).read(_shards(state))
    if not args.no_load_optim:
        backend.optimizer.steps = meta["steps"]
    rng = path / f"rng_{backend.rank}.pt"
    if rng.is_file() and not args.no_load_rng:
        _set_rng_state(torch.load(rng, weights_only=True))


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
