"""Save and load the training state of all ranks, by torch's distributed checkpoint.

Tensors are stored whole by name, so another number of ranks can read them. The optimizer's step and the
schedule come back exactly; random-number generators where the rank existed before.
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from slime.backends.saving import BackgroundSave
from slime.weights.dcp_metadata import require_tensors

if TYPE_CHECKING:
    from slime.backends.fsdp.backend import FsdpBackend

META = "trainer.json"


def _state(backend: FsdpBackend, extra_copies: list[str], with_optimizer: bool) -> dict[str, Any]:
    state: dict[str, Any] = {f"model/{name}": p.detach() for name, p in backend.named_parameters}
    state |= {f"buffer/{name}": b for name, b in backend.named_buffers}
    if with_optimizer:
        state |= {f"optimizer/{name}": t for name, t in backend.optimizer.tensors().items()}
    for tag in extra_copies:
        state |= {f"copy/{tag}/{name}": t for name, t in backend.bank.tensors(tag).items()}
    return state


def save_training_state(backend: FsdpBackend, path: Path, with_optimizer: bool) -> None:
    """Write below ``path``; a collective. A half-written folder is the caller's to hide."""
    if backend.rank == 0:
        path.mkdir(parents=True, exist_ok=True)
    backend.barrier()
    copies = sorted(backend.moving_copies)
    state, folder, alone = _state(backend, copies, with_optimizer), path / "dcp", not dist.is_initialized()
    if backend.args.async_save:
        if backend.world_size > 1 and backend.save_group is None:  # its calls overlap those of training
            backend.save_group = dist.new_group(backend="gloo")
        future = dcp.async_save(state, checkpoint_id=folder, no_dist=alone, process_group=backend.save_group)
        backend.saving = BackgroundSave(cast("Future[Any]", future))
    else:
        dcp.save(state, checkpoint_id=folder, no_dist=alone)
    torch.save(_rng_state(), path / f"rng_{backend.rank}.pt")
    if backend.rank == 0:
        meta = {
            "steps": backend.optimizer.steps,
            "world_size": backend.world_size,
            "copies": copies,
            "optimizer": with_optimizer,
            "role": backend.role,
        }
        (path / META).write_text(json.dumps(meta, indent=2) + "\n")
    backend.barrier()


def load_training_state(backend: FsdpBackend, path: Path) -> None:
    """Read what :func:`save_training_state` wrote, whatever the number of ranks was.

    ``--no-load-optim`` leaves optimizer and schedule at their start, ``--no-load-rng`` the random state, ``--finetune``
    both and the copies that a run made of its weights.

    Raises:
        FileNotFoundError: there is no such state.
        ValueError: it belongs to the other role, or its index could run code.
    """
    if not (path / META).is_file():
        raise FileNotFoundError(
            f"no training state in {path}: {META} is missing; --load takes a folder that --save wrote"
        )
    meta = json.loads((path / META).read_text())
    if meta["role"] != backend.role:
        raise ValueError(f"{path} holds the state of the {meta['role']}, not of the {backend.role}")
    args = backend.args
    copies = [] if args.finetune else meta["copies"]
    for tag in copies:
        backend.bank.copy("actor", tag)  # makes room of the right shape
        backend.moving_copies.add(tag)
    state = _state(backend, copies, meta["optimizer"] and not args.no_load_optim)
    require_tensors(path / "dcp")
    dcp.load(state, checkpoint_id=path / "dcp", no_dist=not dist.is_initialized())
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
