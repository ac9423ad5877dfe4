"""Save and load the training state of all ranks with torch's distributed checkpoint.

Tensors are stored by name, and each rank writes its shards to its own file, so another number of
ranks can load them. With several replicas (``--fsdp-shard-size``), only one of them writes a
tensor. The step of the optimizer and the schedule are restored exactly, and random-number
generators on the ranks that existed before.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from slime.backends.bank import shard_box
from slime.backends.collectives import NamedTensor, local
from slime.backends.fsdp.optimizer import ScheduledAdamW
from slime.backends.saving import SavedState
from slime.backends.tensor_index import META
from slime.backends.tensor_shards import StoredTensors, TensorShard

TENSORS = "dcp"


class _Stored(NamedTuple):
    part: Tensor
    """The shard of this rank."""
    like: Tensor
    """A tensor with the sharding of the stored one: a DTensor, or a plain tensor if every rank has
    the whole tensor.
    """


@dataclass
class FsdpState(SavedState):
    """See :class:`slime.backends.saving.SavedState`."""

    shard_size: int
    """The number of ranks that share one replica of the model."""
    buffers: list[NamedTensor]
    optimizer: ScheduledAdamW

    def load(self, path: Path) -> None:
        """Load what :meth:`writer` wrote, with any number of ranks.

        With ``--no-load-optim``, optimizer and schedule are not loaded; with ``--no-load-rng``, the
        random state is not; with ``--finetune``, neither of them and none of the copies that a run
        made of its weights.

        Raises:
            FileNotFoundError: There is no such state.
            ValueError: The state belongs to the other role or to another model, or its index could
                execute code.
            SnapshotError: A file has changed since it was written.
        """
        # A snapshot of the other role, of another adapter or with a damaged file is refused before
        # anything is changed.
        meta = json.loads((path / META).read_text())
        self.require_fit(path, meta)
        # Copies that the run made are read into tensors of their own, which must exist first.
        args = self.args
        copies = [] if args.finetune else meta["copies"]
        for tag in copies:
            self.bank.copy("actor", tag)  # allocates tensors with the right shapes
            self.bank.moving.add(tag)
        tensors = self._tensors(copies, meta["optimizer"] and not args.no_load_optim)
        stored = StoredTensors(path / TENSORS)
        # A model with fewer layers finds all that it reads in the snapshot of a deeper one.
        unread = {name for name in stored.shapes if name.startswith("model/")} - tensors.keys()
        if unread:
            raise ValueError(f"{path} is of another model: this one has no {min(unread)}")
        stored.read(_shards(tensors))
        # The step is that of the schedule. The moments were read with the tensors above.
        if not args.no_load_optim:
            self.optimizer.steps = meta["steps"]
            if self.optimizer.loss_scale is not None and meta.get("loss_scale"):
                self.optimizer.loss_scale.load(meta["loss_scale"])
        self.load_rng(path)

    def _tensors(self, copies: list[str], with_optimizer: bool) -> dict[str, _Stored]:
        named: dict[str, Tensor] = {f"model/{name}": p for name, p in self.bank.named}
        named |= {f"buffer/{name}": b for name, b in self.buffers}
        if with_optimizer:
            named |= {f"optimizer/{name}": t for name, t in self.optimizer.tensors().items()}
        state = {name: _Stored(local(tensor.detach()), tensor) for name, tensor in named.items()}
        parameters = dict(self.bank.named)
        for tag in copies:
            # A copy is a plain tensor on the CPU. Its sharding is that of its parameter.
            copy = self.bank.tensors(tag)
            state |= {
                f"copy/{tag}/{name}": _Stored(part, parameters[name]) for name, part in copy.items()
            }
        return state

    def written(self, path: Path) -> dict[Path, list[TensorShard]]:
        """See :meth:`SavedState.written`.

        The ranks of one replica write a whole tensor together. Tensors are distributed over
        replicas so that all write about the same number of bytes. Rank 0 writes tensors that are
        not sharded.
        """
        state = self._tensors(sorted(self.bank.moving), with_optimizer=not self.args.no_save_optim)
        sizes = [0] * (self.world_size // self.shard_size)
        mine = self.rank // self.shard_size
        found = {}
        # The largest tensors come first, and each goes to the replica with the least so far. Every
        # rank computes the whole assignment, so the order must be the same on all ranks: it depends
        # on whole sizes, not on shards.
        for name, stored in sorted(state.items(), key=lambda item: -item[1].like.numel()):
            writer = 0
            if isinstance(stored.like, DTensor):
                writer = sizes.index(min(sizes))
                sizes[writer] += stored.like.numel()
            if writer == mine and (isinstance(stored.like, DTensor) or self.rank == 0):
                found[name] = stored
        return {path / TENSORS: _shards(found)}

    def describe(self) -> dict[str, object]:
        return {
            "steps": self.optimizer.steps,
            "world_size": self.world_size,
            "copies": sorted(self.bank.moving),
            "optimizer": not self.args.no_save_optim,
            "role": self.role,
            "loss_scale": None
            if self.optimizer.loss_scale is None
            else self.optimizer.loss_scale.state(),
        } | ({} if self.adapter is None else {"lora": self.adapter.describe()})


def _shards(state: dict[str, _Stored]) -> list[TensorShard]:
    """Return this rank's shard of each tensor."""
    found = []
    for name, (part, like) in state.items():
        # If a tensor has fewer rows than there are ranks, the last ranks have an empty shard and
        # write nothing.
        offsets = shard_box(like)[0] if isinstance(like, DTensor) else (0,) * like.dim()
        if part.numel() or not isinstance(like, DTensor):
            found.append(TensorShard(name, part, offsets, tuple(like.shape)))
    return found
