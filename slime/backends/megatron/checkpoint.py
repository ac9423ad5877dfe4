"""Training state in torch's distributed checkpoint format (``torch_dist``), readable by another layout.

A folder holds ``trainer.json`` (layout, shape, flags: what converters need), the tensors of model and optimizer, one
folder per further copy of the weights, and each rank's random state. Names are megatron-core's: layers are numbered as
in the whole model, so neither pipeline nor interleaving shows in them. Every rank writes its own part of every tensor
(:mod:`~slime.backends.megatron.shards`). With ``--ckpt-format torch`` each rank's own tensors are in files of their own
instead (:mod:`~slime.backends.megatron.rank_files`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from slime.backends.megatron import rank_files
from slime.backends.megatron.core import MegatronError
from slime.backends.megatron.shards import STATE, is_sharded, state_shards, weight_shards, written_shards
from slime.backends.saving import in_background, require_undamaged, small_files_writer
from slime.backends.tensor_shards import StoredTensors, TensorShard, write_shards
from slime.checkpoint.files import FileEntry, describe_files
from slime.config.layout import ParallelLayout
from slime.weights.torch_dist import RANK_FILES, TENSORS, describe, mark_as_megatron, read_meta

if TYPE_CHECKING:
    from slime.backends.megatron.backend import MegatronBackend

_Write = Callable[[], list[FileEntry]]
"""Writes this rank's files."""


def save_training_state(backend: MegatronBackend, path: Path, with_optimizer: bool) -> list[FileEntry]:
    """Write below ``path``; a collective. A half-written folder is the caller's to hide.

    Returns:
        The files that this rank wrote. With ``--async-save`` none, and ``backend.saving`` returns them.
    """
    if backend.saving is not None:  # its copies are in the memory that this save takes
        backend.saving.finish(backend.args.phase_timeout)
    copies = sorted(backend.moving_copies)
    if backend.rank == 0:
        for name in (backend.args.ckpt_format, *(f"copy_{tag}" for tag in copies)):
            (path / name).mkdir(parents=True, exist_ok=True)
    backend.barrier()
    save = _rank_files_writer if backend.args.ckpt_format == "torch" else _shards_writer
    write = save(backend, path, copies, with_optimizer)
    description = _describe(backend, copies, with_optimizer) if backend.rank == 0 else None
    small = small_files_writer(path, backend.rank, _rng_state(), description)
    if backend.args.async_save:
        backend.saving = in_background(lambda: [*small(), *write()])
        return []
    return [*small(), *write()]


def _by_folder(
    backend: MegatronBackend, path: Path, copies: list[str], with_optimizer: bool
) -> dict[Path, list[TensorShard]]:
    """What this rank writes."""
    chunks, chained = backend.chunks, backend.optimizer.chained
    folders = {path / TENSORS: written_shards(chunks, chained, with_optimizer=with_optimizer)}
    for tag in copies:
        folders[path / f"copy_{tag}"] = written_shards(chunks, chained, _tensors_of_copy(backend, tag))
    return folders


def take_save_memory(backend: MegatronBackend, with_optimizer: bool) -> None:
    """Get the memory that the first asynchronous save copies into, while training goes on."""
    folders = _by_folder(backend, Path(), sorted(backend.moving_copies), with_optimizer)
    backend.save_memory.take(shard for shards in folders.values() for shard in shards)


def _shards_writer(backend: MegatronBackend, path: Path, copies: list[str], with_optimizer: bool) -> _Write:
    """With ``--async-save`` the tensors are copied at once."""
    folders = _by_folder(backend, path, copies, with_optimizer)
    if backend.args.async_save:
        copied = iter(backend.save_memory.copied(shard for shards in folders.values() for shard in shards))
        folders = {folder: list(islice(copied, len(shards))) for folder, shards in folders.items()}
    return partial(_write_folders, folders, path, backend.save_group, backend.rank)


def _write_folders(folders: dict[Path, list[TensorShard]], root: Path, group: Any, rank: int) -> list[FileEntry]:
    entries = []
    for folder, shards in folders.items():
        entries += write_shards(shards, folder, root, group)
        if rank == 0:
            entries += describe_files(mark_as_megatron(folder), root)
    return entries


def _rank_files_writer(backend: MegatronBackend, path: Path, copies: list[str], with_optimizer: bool) -> _Write:
    """Tensors are copied at once."""
    files = rank_files.content(_own_states(backend.chunks), path / RANK_FILES)
    if with_optimizer:
        files |= rank_files.optimizer_content(backend, path / RANK_FILES)
    for tag in copies:
        with backend.bank.using(tag):
            files |= rank_files.content(_own_states(backend.chunks), path / f"copy_{tag}")
    return partial(rank_files.write, files, path)


def load_training_state(backend: MegatronBackend, path: Path) -> None:
    """Read what :func:`save_training_state` wrote, by whatever layout. Each rank reads its own part.

    ``--no-load-optim`` leaves optimizer and schedule at their start, ``--no-load-rng`` the random state, ``--finetune``
    both and the copies that a run made of its weights.

    Raises:
        FileNotFoundError: there is no such state.
        MegatronError: it belongs to the other role, or cannot be read by this layout; says what to do.
        SnapshotError: a file has changed since it was written.
    """
    meta = read_meta(path)
    if meta["role"] != backend.role:
        raise MegatronError(f"{path} holds the state of the {meta['role']}, not of the {backend.role}")
    require_undamaged(path, backend.rank, backend.world_size)
    args = backend.args
    for tag in [] if args.finetune else meta["copies"]:
        backend.moving_copies.add(tag)
        with backend.bank.filling(tag):
            load_weights(backend.chunks, backend.layout, path, f"copy_{tag}")
    if not meta["optimizer"] or args.no_load_optim or args.finetune:
        load_weights(backend.chunks, backend.layout, path)
        backend.optimizer.chained.reload_model_params()
    elif meta["ckpt_format"] == "torch":
        load_weights(backend.chunks, backend.layout, path)
        rank_files.read_optimizer(backend, path / RANK_FILES, _written_by(meta), _grid(backend))
        backend.optimizer.set_steps(meta["steps"])
    else:
        _load_with_optimizer(backend, path, meta)
    rng = path / f"rng_{backend.rank}.pt"
    if rng.is_file() and not args.no_load_rng and not args.finetune:
        _set_rng_state(torch.load(rng, weights_only=True))


def load_weights(chunks: list[Any], layout: ParallelLayout, path: Path, part: str | None = None) -> None:
    """The model's weights only, or those of its copy in folder ``part``, into this rank's parameters."""
    meta = read_meta(path)
    if meta["ckpt_format"] == "torch":
        states = rank_files.read_weights(path / (part or RANK_FILES), meta["layout"], _layout(layout))
        for chunk, state in zip(chunks, states, strict=True):
            _unwrapped(chunk).load_state_dict(state)
    else:
        _read(path / (part or TENSORS), weight_shards(chunks))


def _load_with_optimizer(backend: MegatronBackend, path: Path, meta: dict[str, Any]) -> None:
    stored = StoredTensors(path / TENSORS)
    needed = f"{STATE}exp_avg."
    if (
        meta["steps"]
        and backend.args.optimizer == "adam"
        and not any(name.startswith(needed) for name in stored.shapes)
    ):
        raise MegatronError(
            f"{path} has no moments of Adam under names that this version reads ({needed}...): pass --no-load-optim to "
            "go on with the weights only"
        )
    try:
        of_optimizer = state_shards(backend.chunks, backend.optimizer.chained, stored)
        stored.read([*weight_shards(backend.chunks), *of_optimizer])
    except ValueError as error:
        raise MegatronError(f"{error}; --no-load-optim goes on with the weights only") from error
    backend.optimizer.set_adam_steps(meta.get("adam_steps", meta["steps"]))
    backend.optimizer.set_steps(meta["steps"])


def _read(folder: Path, shards: list[TensorShard]) -> None:
    try:
        StoredTensors(folder).read(shards)
    except ValueError as error:
        raise MegatronError(str(error)) from error


def _tensors_of_copy(backend: MegatronBackend, tag: str) -> Callable[[Tensor], Tensor]:
    """Where a copy has the weights of each parameter."""
    live = [tensor for _, tensor in backend.bank.named]
    of_copy = {id(tensor): copy for tensor, copy in zip(live, backend.bank.copies[tag], strict=True)}
    return lambda tensor: of_copy[id(tensor)]


def _own_states(chunks: list[Any]) -> list[dict[str, Any]]:
    """What this rank holds, unsharded."""
    states = [_unwrapped(chunk).state_dict() for chunk in chunks]
    return [{name: x for name, x in state.items() if not name.endswith("_extra_state")} for state in states]


def _unwrapped(chunk: Any) -> Any:
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk


# --- the rest ------------------------------------------------------------------------------------


def _describe(backend: MegatronBackend, copies: list[str], with_optimizer: bool) -> dict[str, Any]:
    return describe(
        backend.family,
        backend.settings,
        backend.args.hf_checkpoint,
        role=backend.role,
        steps=backend.optimizer.steps,
        copies=copies,
        optimizer=with_optimizer,
        distributed_optimizer=is_sharded(backend.optimizer.chained),
        adam_steps=backend.optimizer.adam_steps(),
        layout=_layout(backend.layout),
        ckpt_format=backend.args.ckpt_format,
        train_dtype=backend.args.train_dtype,
    )


def _layout(layout: ParallelLayout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in ("world_size", "tp", "pp", "cp", "ep", "etp", "vpp")}


def _written_by(meta: dict[str, Any]) -> dict[str, Any]:
    return {**meta["layout"], "distributed optimizer": meta["distributed_optimizer"]}


def _grid(backend: MegatronBackend) -> dict[str, Any]:
    return {**_layout(backend.layout), "distributed optimizer": is_sharded(backend.optimizer.chained)}


def _rng_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
