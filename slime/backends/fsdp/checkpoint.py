"""Save and load the training state of all ranks, by torch's distributed checkpoint.

Tensors are stored by name, each rank's shard in a file of the rank, so another number of ranks can read them. The
optimizer's step and the schedule come back exactly; random-number generators where the rank existed before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slime.backends.collectives import local
from slime.backends.saving import in_background, new_save_group, require_undamaged
from slime.backends.tensor_shards import StoredTensors, TensorShard, copied, write_shards
from slime.checkpoint.files import FileEntry, describe_files

if TYPE_CHECKING:
    from slime.backends.fsdp.backend import FsdpBackend

META = "trainer.json"
TENSORS = "dcp"


def _state(backend: FsdpBackend, extra_copies: list[str], with_optimizer: bool) -> dict[str, Any]:
    state: dict[str, Any] = {f"model/{name}": p.detach() for name, p in backend.named_parameters}
    state |= {f"buffer/{name}": b for name, b in backend.named_buffers}
    if with_optimizer:
        state |= {f"optimizer/{name}": t for name, t in backend.optimizer.tensors().items()}
    for tag in extra_copies:
        state |= {f"copy/{tag}/{name}": t for name, t in backend.bank.tensors(tag).items()}
    return state


def _shards(state: dict[str, Any], holds_replicated: bool = True) -> Iterator[TensorShard]:
    """This rank's part of the tensors; of those that are not sharded all, or nothing."""
    for name, tensor in state.items():
        if not isinstance(tensor, DTensor):
            if holds_replicated:
                yield TensorShard(name, tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))
            continue
        own = local(tensor).detach()
        _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        if own.numel():
            yield TensorShard(name, own, tuple(offsets), tuple(tensor.shape))


def save_training_state(backend: FsdpBackend, path: Path, with_optimizer: bool) -> list[FileEntry]:
    """Write below ``path``; a collective. A half-written folder is the caller's to hide.

    Returns:
        The files that this rank wrote. With ``--async-save`` none, and ``backend.saving`` returns them.
    """
    if backend.rank == 0:
        path.mkdir(parents=True, exist_ok=True)
    backend.barrier()
    copies = sorted(backend.moving_copies)
    shards = list(_shards(_state(backend, copies, with_optimizer), holds_replicated=backend.rank == 0))
    small = _small_files_writer(backend, path, copies, with_optimizer)
    if not backend.args.async_save:
        return [*small(), *write_shards(shards, path / TENSORS, path)]
    if backend.save_group is None:
        backend.save_group = new_save_group()
    write = partial(write_shards, copied(shards), path / TENSORS, path, backend.save_group)
    backend.saving = in_background(lambda: [*small(), *write()])
    return []


def _small_files_writer(
    backend: FsdpBackend, path: Path, copies: list[str], with_optimizer: bool
) -> Callable[[], list[FileEntry]]:
    """Writes the random state and, on rank 0, what describes the folder; both as they are now."""
    rng, description = _rng_state(), None
    if backend.rank == 0:
        meta = {
            "steps": backend.optimizer.steps,
            "world_size": backend.world_size,
            "copies": copies,
            "optimizer": with_optimizer,
            "role": backend.role,
        }
        description = json.dumps(meta, indent=2)

    def write() -> list[FileEntry]:
        files = [path / f"rng_{backend.rank}.pt"]
        torch.save(rng, files[0])
        if description is not None:
            (path / META).write_text(description + "\n")
            files.append(path / META)
        return describe_files(files, path)

    return write


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
    StoredTensors(path / TENSORS).read(list(_shards(state)))
    if not args.no_load_optim:
        backend.optimizer.steps = meta["steps"]
    rng = path / f"rng_{backend.rank}.pt"
    if rng.is_file() and not args.no_load_rng:
        _set_rng_state(torch.load(rng, weights_only=True))


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
