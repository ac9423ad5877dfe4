"""Training state as megatron-core's distributed checkpoint (``torch_dist``), readable by another layout.

A folder holds ``trainer.json`` (layout, shape, flags: what converters need), the sharded tensors of model and
optimizer, one folder per further copy of the weights, and each rank's random state. Layers are stored one by one
under their index in the whole model, so neither pipeline nor interleaving shows in the names.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from slime.backends.megatron.core import MegatronError

if TYPE_CHECKING:
    from slime.backends.megatron.backend import MegatronBackend

META = "trainer.json"
TENSORS = "torch_dist"
FORMAT = ("torch_dist", 1)


def save_training_state(backend: MegatronBackend, path: Path, with_optimizer: bool) -> None:
    """Write below ``path``; a collective. A half-written folder is the caller's to hide."""
    copies = sorted(backend.moving_copies)
    if backend.rank == 0:
        for name in (TENSORS, *(f"copy_{tag}" for tag in copies)):
            (path / name).mkdir(parents=True, exist_ok=True)
    backend.barrier()
    state = _model_state(backend)
    if with_optimizer:
        state["optimizer"] = _optimizer_state(backend, state, is_loading=False)
    _write(state, path / TENSORS)
    for tag in copies:
        with backend.bank.using(tag):
            _write(_model_state(backend), path / f"copy_{tag}")
    torch.save(_rng_state(), path / f"rng_{backend.rank}.pt")
    if backend.rank == 0:
        (path / META).write_text(json.dumps(_describe(backend, copies, with_optimizer), indent=2) + "\n")
    backend.barrier()


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
        backend.bank.copy("actor", tag)  # makes room of the right shape
        backend.moving_copies.add(tag)
        with backend.bank.using(tag):
            load_weights(backend, path / f"copy_{tag}")
    if not meta["optimizer"] or args.no_load_optim or args.finetune:
        load_weights(backend, path / TENSORS)
        backend.optimizer.chained.reload_model_params()
    else:
        _load_with_optimizer(backend, path, meta)
    rng = path / f"rng_{backend.rank}.pt"
    if rng.is_file() and not args.no_load_rng and not args.finetune:
        _set_rng_state(torch.load(rng, weights_only=False))


def read_meta(path: Path) -> dict[str, Any]:
    """What ``trainer.json`` says of a folder that was saved here."""
    file = path / META
    if not file.is_file():
        raise FileNotFoundError(f"no training state in {path}: {META} is missing; --load takes a folder of --save")
    meta: dict[str, Any] = json.loads(file.read_text())
    if meta.get("format") != "megatron":
        raise MegatronError(f"{path} was saved by another --train-backend; load it with that one, or use --save-hf")
    return meta


def load_weights(backend: MegatronBackend, folder: Path) -> None:
    """The model's weights only, into this rank's parameters."""
    backend._finish_gather()
    loaded = _read(_model_state(backend), folder)
    _put_model(backend, loaded)


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
    _prime(backend)
    state = _model_state(backend)
    state["optimizer"] = _optimizer_state(backend, state, is_loading=True)
    loaded = _read(state, path / TENSORS)
    _put_model(backend, loaded)
    backend.optimizer.chained.load_state_dict(loaded["optimizer"])
    _unshare_steps(backend)
    backend.optimizer.steps = meta["steps"]
    backend.optimizer.scheduler.num_steps = 0
    backend.optimizer.scheduler.step(increment=meta["steps"])


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


def _model_state(backend: MegatronBackend) -> dict[str, Any]:
    models = [chunk.module for chunk in backend.chunks]
    metadata = _metadata()
    if len(models) == 1:
        return {"model": models[0].sharded_state_dict(metadata=metadata)}
    return {f"model{i}": model.sharded_state_dict(metadata=metadata) for i, model in enumerate(models)}


def _optimizer_state(backend: MegatronBackend, model_state: dict[str, Any], is_loading: bool) -> Any:
    if not is_loading:
        _prime(backend)
    return backend.optimizer.chained.sharded_state_dict(model_state, is_loading=is_loading, metadata=_metadata())


def _put_model(backend: MegatronBackend, loaded: dict[str, Any]) -> None:
    for i, chunk in enumerate(backend.chunks):
        chunk.module.load_state_dict(loaded["model" if len(backend.chunks) == 1 else f"model{i}"])


def _write(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecations between torch and megatron-core
        dist_checkpointing.save(state, str(folder), FORMAT, validate_access_integrity=False)


@torch.no_grad()
def _read(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder), validate_access_integrity=False)
    return loaded


# --- torch's Adam in megatron-core's optimizers --------------------------------------------------


def _inner(backend: MegatronBackend) -> list[Any]:
    """torch optimizers; a rank without parameters of a kind has None."""
    chained = backend.optimizer.chained.chained_optimizers
    return [optimizer.optimizer for optimizer in chained if optimizer.optimizer is not None]


def _is_distributed(backend: MegatronBackend) -> bool:
    return any(isinstance(x, DistributedOptimizer) for x in backend.optimizer.chained.chained_optimizers)


def _prime(backend: MegatronBackend) -> None:
    """Moments of zero before the first step: Megatron's state dict takes it that they exist."""
    for optimizer in _inner(backend):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.state[parameter]:
                    zeros = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
                    optimizer.state[parameter].update(step=torch.tensor(0.0), **zeros)


def _unshare_steps(backend: MegatronBackend) -> None:
    """Megatron gives every parameter the same ``step`` tensor, which torch's Adam advances once for each of them:
    bias corrections would be those of a much later step."""
    for state in backend.optimizer.states():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].clone()


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
    layout = backend.layout
    sizes = {name: getattr(layout, name) for name in ("world_size", "tp", "pp", "cp", "ep", "etp", "vpp")}
    return {
        "format": "megatron",
        "role": backend.role,
        "steps": backend.optimizer.steps,
        "copies": copies,
        "optimizer": with_optimizer,
        "distributed_optimizer": _is_distributed(backend),
        "layout": sizes,
        "model_type": backend.hf_config.model_type,
        "hf_checkpoint": backend.args.hf_checkpoint,
        "settings": backend.settings,
        "train_dtype": backend.args.train_dtype,
    }


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
