"""Further copies of the weights (reference, teacher, old actor), in CPU memory, swapped in to be used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from slime.backends.collectives import local
from slime.backends.loss import needs_ref_log_probs, needs_teacher_log_probs

LIVE = "actor"


class WeightBank:
    """Copies of a model's parameters by tag, each this rank's shard only, in the model's dtype.

    ``"actor"`` is what the model holds. On the CPU without sharding a swap exchanges pointers; otherwise
    it copies, through pinned memory on CUDA.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]], may_swap_pointers: bool = True) -> None:
        """``may_swap_pointers`` False: someone else points into these tensors' memory."""
        self.named = named
        self.copies: dict[str, list[Tensor]] = {}
        unsharded = all(not isinstance(p, DTensor) and p.device.type == "cpu" for _, p in named)
        self._pointers = may_swap_pointers and unsharded

    def _live(self) -> list[Tensor]:
        return [local(p.detach()) for _, p in self.named]

    def _require(self, tag: str) -> list[Tensor]:
        if tag == LIVE:
            return self._live()
        if tag not in self.copies:
            raise KeyError(
                f"this trainer holds no {tag!r} weights; it has actor{''.join(', ' + t for t in self.copies)}"
            )
        return self.copies[tag]

    @torch.no_grad()
    def copy(self, source: str, target: str) -> None:
        """Make ``target`` equal to ``source``.

        Raises:
            KeyError: there is no such copy.
        """
        tensors = self._require(source)
        if target != LIVE and target not in self.copies:
            self.copies[target] = [_host_like(t) for t in tensors]
        for mine, theirs in zip(self._require(target), tensors, strict=True):
            mine.copy_(theirs)

    def add(self, tag: str, full: dict[str, Tensor]) -> None:
        """A copy from whole tensors, by the same names.

        Raises:
            ValueError: other names or shapes than the trained model's.
        """
        shards = []
        for name, p in self.named:
            if name not in full or full[name].shape != p.shape:
                there = tuple(full[name].shape) if name in full else "missing"
                raise ValueError(f"{tag} model: {name} is {there}, in the trained model {tuple(p.shape)}")
            shard = _host_like(local(p.detach()))
            shards.append(shard.copy_(shard_of(full[name], p)))
        self.copies[tag] = shards

    @contextmanager
    def using(self, tag: str) -> Iterator[None]:
        """Have the model hold another copy for a while."""
        if tag == LIVE:
            yield
            return
        self._require(tag)
        self._swap(tag)
        try:
            yield
        finally:
            self._swap(tag)

    @torch.no_grad()
    def _swap(self, tag: str) -> None:
        copies = self.copies[tag]
        for i, (_, p) in enumerate(self.named):
            if self._pointers:
                p.data, copies[i] = copies[i], p.data
            else:
                mine = local(p.detach())
                before = mine.to("cpu", copy=True)
                mine.copy_(copies[i])
                copies[i].copy_(before)

    def tensors(self, tag: str) -> dict[str, Tensor]:
        """A copy as what a distributed checkpoint can reshard."""
        pairs = zip(self.named, self._require(tag), strict=True)
        return {name: _as_global(tensor, p) for (name, p), tensor in pairs}


def _host_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def shard_of(full: Tensor, like: Tensor) -> Tensor:
    """This rank's part of ``full``, split as ``like`` is."""
    if not isinstance(like, DTensor):
        return full
    (placement,) = like.placements
    assert isinstance(placement, Shard), f"parameters are sharded over one mesh dimension, not {placement}"
    mesh = like.device_mesh
    chunks = full.chunk(mesh.size(), dim=placement.dim)
    rank = mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else full.narrow(placement.dim, 0, 0)


def _as_global(tensor: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return tensor
    return DTensor.from_local(
        tensor, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def load_copies(args: Any, bank: WeightBank, initial: str, load: Callable[[str, str], None]) -> set[str]:
    """Make the copies that the flags ask for, beside the weights that training starts from.

    Args:
        initial: where the live weights come from; a reference from the same place is copied, not read again.
        load: ``load(tag, path)`` reads the weights at ``path`` into the copy ``tag``.

    Returns:
        Those that change during a run, and so belong in its snapshots.
    """
    moving = set()
    if needs_ref_log_probs(args):
        if args.ref_load and args.ref_load != initial:
            load("ref", args.ref_load)
        else:
            bank.copy(LIVE, "ref")
        if args.ref_update_interval:
            moving.add("ref")
    if needs_teacher_log_probs(args):
        load("teacher", args.opd_teacher_load)
    if args.keep_old_actor:
        bank.copy(LIVE, "old_actor")
        moving.add("old_actor")
    return moving
