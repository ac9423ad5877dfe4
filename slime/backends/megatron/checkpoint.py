"""Training state as megatron-core's distributed checkpoint (``torch_dist``), readable by another layout.

A folder holds ``trainer.json`` (layout, shape, flags: what converters need), the sharded tensors of model and
optimizer, one folder per further copy of the weights, and each rank's random state. Layers are stored one by one
under their index in the whole model, so neither pipeline nor interleaving shows in the names. With ``--ckpt-format
torch`` each rank's own tensors stand in files of their own instead (:mod:`~slime.backends.megatron.rank_files`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from slime.backends.megatron import rank_files
from slime.backends.megatron.core import MegatronError
from slime.backends.saving import BackgroundSave
from slime.config.layout import ParallelLayout
from slime.weights.dcp_metadata import require_tensors
from slime.weights.torch_dist import META, RANK_FILES, TENSORS, describe, read_meta

if TYPE_CHECKING:
    from slime.backends.megatron.backend import MegatronBackend

FORMAT = ("torch_dist", 1)
_Write = tuple[Callable[[], Any], list[Callable[[], None]]]
"""What writes a rank's files, and what completes the folder once all ranks have."""


def save_training_state(backend: MegatronBackend, path: Path, with_optimizer: bool) -> None:
    """Write below ``path``; a collective. A half-written folder is the caller's to hide."""
    copies = sorted(backend.moving_copies)
    if backend.rank == 0:
        for name in (backend.args.ckpt_format, *(f"copy_{tag}" for tag in copies)):
            (path / name).mkdir(parents=True, exist_ok=True)
    backend.barrier()
    save = _save_rank_files if backend.args.ckpt_format == "torch" else _save_distributed
    later = save(backend, path, copies, with_optimizer)
    if backend.args.async_save:
        backend.saving = _in_background(later)
    torch.save(_rng_state(), path / f"rng_{backend.rank}.pt")
    if backend.rank == 0:
        (path / META).write_text(json.dumps(_describe(backend, copies, with_optimizer), indent=2) + "\n")
    backend.barrier()


def _save_distributed(backend: MegatronBackend, path: Path, copies: list[str], with_optimizer: bool) -> list[_Write]:
    """Returns what ``--async-save`` leaves to be written."""
    state = _model_state(backend.chunks)
    if with_optimizer:
        state["optimizer"] = _optimizer_state(backend, state, is_loading=False)
    later = [_write(state, path / TENSORS, backend.args.async_save)]
    for tag in copies:
        with backend.bank.using(tag):
            later.append(_write(_model_state(backend.chunks), path / f"copy_{tag}", backend.args.async_save))
    return [write for write in later if write is not None]


def _save_rank_files(backend: MegatronBackend, path: Path, copies: list[str], with_optimizer: bool) -> list[_Write]:
    """Returns what ``--async-save`` leaves to be written."""
    files = rank_files.content(_own_states(backend.chunks), path / RANK_FILES)
    if with_optimizer:
        files |= rank_files.optimizer_content(backend, path / RANK_FILES)
    for tag in copies:
        with backend.bank.using(tag):
            files |= rank_files.content(_own_states(backend.chunks), path / f"copy_{tag}")
    if backend.args.async_save:
        return [(partial(rank_files.write, files), [])]
    rank_files.write(files)
    return []


def load_training_state(backend: MegatronBackend, path: Path) -> None:
    """Read what :func:`save_training_state` wrote, by whatever layout.

    ``--no-load-optim`` leaves optimizer and schedule at their start, ``--no-load-rng`` the random state, ``--finetune``
    both and the copies that a run made of its weights.

    Raises:
        FileNotFoundError: there is no such state.
        MegatronError: it belongs to the other role, or cannot be read by this layout; says what to do.
    """
    meta = read_meta(path)
    if meta["role"] != backend.role:
        raise MegatronError(f"{path} holds the state of the {meta['role']}, not of the {backend.role}")
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
        _put_model(chunks, states)
    else:
        loaded = _read(_model_state(chunks), path / (part or TENSORS))
        _put_model(chunks, [loaded[name] for name in _chunk_names(chunks)])


def _load_with_optimizer(backend: MegatronBackend, path: Path, meta: dict[str, Any]) -> None:
    here, there = backend.layout, meta["layout"]
    distributed = _is_distributed(backend)
    if meta["distributed_optimizer"] != distributed:
        other = "--use-distributed-optimizer" if meta["distributed_optimizer"] else "--no-use-distributed-optimizer"
        raise MegatronError(f"{path} was saved with {other}: pass it, or --no-load-optim for the weights only")
    same = {k: there[k] for k in ("tp", "pp", "ep", "etp", "vpp")} == {
        k: getattr(here, k) for k in ("tp", "pp", "ep", "etp", "vpp")
    }
    if not distributed and not same:
        raise MegatronError(f"{path} has another layout: only the distributed optimizer's state moves between layouts")
    backend.optimizer.prime()
    state = _model_state(backend.chunks)
    state["optimizer"] = _optimizer_state(backend, state, is_loading=True)
    loaded = _read(state, path / TENSORS)
    _put_model(backend.chunks, [loaded[name] for name in _chunk_names(backend.chunks)])
    backend.optimizer.chained.load_state_dict(loaded["optimizer"])
    backend.optimizer.unshare_steps()
    backend.optimizer.set_steps(meta["steps"])


# --- state dicts ---------------------------------------------------------------------------------


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "non_homogeneous_layers": True,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }


def _model_state(chunks: list[Any]) -> dict[str, Any]:
    states = [_unwrapped(chunk).sharded_state_dict(metadata=_metadata()) for chunk in chunks]
    return dict(zip(_chunk_names(chunks), map(_without_extra, states), strict=True))


def _own_states(chunks: list[Any]) -> list[dict[str, Any]]:
    """What this rank holds, unsharded."""
    return [_without_extra(_unwrapped(chunk).state_dict()) for chunk in chunks]


def _without_extra(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not name.endswith("_extra_state")}


def _chunk_names(chunks: list[Any]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]


def _unwrapped(chunk: Any) -> Any:
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk


def _optimizer_state(backend: MegatronBackend, model_state: dict[str, Any], is_loading: bool) -> Any:
    if not is_loading:
        backend.optimizer.prime()
    return backend.optimizer.chained.sharded_state_dict(model_state, is_loading=is_loading, metadata=_metadata())


def _put_model(chunks: list[Any], states: list[dict[str, Any]]) -> None:
    for chunk, state in zip(chunks, states, strict=True):
        _unwrapped(chunk).load_state_dict(state)


def _write(state: dict[str, Any], folder: Path, later: bool) -> _Write | None:
    """Save; ``later``: only copy what is to be written, and say how to write it and how to complete it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecations between torch and megatron-core
        request = dist_checkpointing.save(
            state, str(folder), FORMAT, validate_access_integrity=False, async_sharded_save=later
        )
    if request is None:
        return None
    if request.async_fn is None:  # this rank has nothing to write
        return lambda: None, request.finalize_fns
    rank, buckets, results = request.async_fn_args
    if torch.cuda.is_initialized():
        copies = request.preload_fn()
    else:
        copies = [(*where, (raw, [(item, x.clone()) for item, x in tensors])) for *where, (raw, tensors) in buckets]
    return partial(request.async_fn, rank, copies, results, **request.async_fn_kwargs), request.finalize_fns


def _in_background(writes: list[_Write]) -> BackgroundSave:
    """Write on a thread; megatron-core's own finalizers, which are collectives, come when all ranks are done."""

    def work() -> None:
        for write, _ in writes:
            write()

    def finalize() -> None:
        torch.distributed.barrier()
        for _, functions in writes:
            for function in functions:
                function()

    pool = ThreadPoolExecutor(1, thread_name_prefix="save")
    written = pool.submit(work)
    pool.shutdown(wait=False)
    return BackgroundSave(written, finalize)


@torch.no_grad()
def _read(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    require_tensors(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder), validate_access_integrity=False)
    return loaded


# --- torch's Adam in megatron-core's optimizers --------------------------------------------------


def _is_distributed(backend: MegatronBackend) -> bool:
    return any(isinstance(x, DistributedOptimizer) for x in backend.optimizer.chained.chained_optimizers)


def keep_steps_on_load() -> None:
    """Reading a fully reshardable state wants a ``step`` per parameter, which is stored per group: take that one."""
    original = DistributedOptimizer._set_main_param_and_optimizer_states
    if getattr(original, "keeps_steps", False):
        return

    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            tensors = {**tensors, "step": state["step"]}
        original(self, model_param, tensors)

    set_states.keeps_steps = True  # type: ignore[attr-defined]
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


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
        distributed_optimizer=_is_distributed(backend),
        layout=_layout(backend.layout),
        ckpt_format=backend.args.ckpt_format,
        train_dtype=backend.args.train_dtype,
    )


def _layout(layout: ParallelLayout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in ("world_size", "tp", "pp", "cp", "ep", "etp", "vpp")}


def _written_by(meta: dict[str, Any]) -> dict[str, Any]:
    return {**meta["layout"], "distributed optimizer": meta["distributed_optimizer"]}


def _grid(backend: MegatronBackend) -> dict[str, Any]:
    return {**_layout(backend.layout), "distributed optimizer": _is_distributed(backend)}


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


keep_steps_on_load()
