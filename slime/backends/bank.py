"""Copies of the weights (reference, teacher, old actor), which are swapped into the model when they
are used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slime.backends.base import TrainNeeds
from slime.backends.collectives import NamedTensor, local
from slime.backends.offload import HostArena, host_tensors
from slime.config.cluster import ClusterConfig
from slime.config.run import CheckpointConfig, weights_path

logger = logging.getLogger(__name__)
LIVE = "actor"
DEVICE_SHARE = 1 / 8
"""Copies stay on the accelerator if they need at most this part of the memory that is free after
model and optimizer are built. Activations and gradients need the rest."""


class WeightBank:
    """Copies of a model's parameters by tag. Each copy has only the shard of this rank.

    The weights in the model have the tag ``"actor"``. The place of the copies determines how they
    get into the model:

    - On the CPU without sharding, pointers are exchanged.
    - On the accelerator (``on_device``), copies have the dtype of the model and are exchanged with
      it tensor by tensor.
    - In CPU memory, which is pinned for CUDA, copies have ``dtype``. While a copy is in use, the
      actor's weights are kept in an arena that all copies share. Only the actor is written back,
      because copies do not change while in use.
    """

    def __init__(
        self,
        named: Sequence[NamedTensor],
        may_swap_pointers: bool = True,
        dtype: torch.dtype | None = None,
        on_device: bool = False,
        arena: HostArena | None = None,
    ) -> None:
        """
        Args:
            may_swap_pointers: False if other objects have pointers to the memory of these tensors.
            dtype: The dtype of floating-point tensors of copies in CPU memory; None for that of the
                model. The dtype of the forward pass loses nothing, because the forward pass casts
                to it anyway.
            arena: Memory for the actor's weights while a copy is in use. It may be the memory to
                which the trainer is offloaded. With None, the bank allocates its own.
        """
        self.named = named
        self.copies: dict[str, list[Tensor]] = {}
        self.moving: set[str] = set()
        """The tags of the copies that change during a run, so that snapshots must contain them."""
        unsharded = all(not isinstance(p, DTensor) and p.device.type == "cpu" for _, p in named)
        self._pointers = may_swap_pointers and unsharded
        self._on_device = on_device and not self._pointers
        self._dtype = None if self._pointers or on_device else dtype
        self._arena = arena

    def _live(self) -> list[Tensor]:
        return [local(p.detach()) for _, p in self.named]

    def _require(self, tag: str) -> list[Tensor]:
        if tag == LIVE:
            return self._live()
        if tag not in self.copies:
            raise KeyError(
                f"this trainer has no {tag!r} weights; it has "
                f"actor{''.join(', ' + t for t in self.copies)}"
            )
        return self.copies[tag]

    def _room(self, tag: str) -> list[Tensor]:
        """Return the tensors of a copy, which are allocated at the first call."""
        if tag not in self.copies:
            live = self._live()
            on_device = self._pointers or self._on_device
            self.copies[tag] = (
                [torch.empty_like(t) for t in live]
                if on_device
                else host_tensors(live, self._dtype)
            )
        return self.copies[tag]

    @torch.no_grad()
    def copy(self, source: str, target: str) -> None:
        """Make ``target`` equal to ``source``.

        Raises:
            KeyError: There is no such copy.
        """
        tensors = self._require(source)
        for mine, theirs in zip(
            self._live() if target == LIVE else self._room(target), tensors, strict=True
        ):
            _copy(mine, theirs)
        _synchronize(self.named)

    @torch.no_grad()
    def add(
        self,
        tag: str,
        full: dict[str, Tensor],
        fetch: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        """Make a copy from whole tensors.

        Args:
            full: The tensors by the names of the parameters. They may be on the ``meta`` device if
                ``fetch`` gets the values from another rank.
            fetch: Returns the values of one tensor of ``full``. It is called in the order of the
                model's parameters, on all ranks together.

        Raises:
            ValueError: Names or shapes differ from those of the trained model.
        """
        for name, p in self.named:
            if name not in full or full[name].shape != p.shape:
                there = tuple(full[name].shape) if name in full else "missing"
                raise ValueError(
                    f"{tag} model: {name} is {there}, but {tuple(p.shape)} in the trained model"
                )
        for (name, p), mine in zip(self.named, self._room(tag), strict=True):
            _copy(mine, shard_of(fetch(full.pop(name)), p))
        _synchronize(self.named)

    @contextmanager
    def using(self, tag: str) -> Iterator[None]:
        """Put another copy into the model within the context. Changes of the model within it may be
        lost; see :meth:`filling`."""
        if tag == LIVE:
            yield
            return
        copies = self._require(tag)
        if self._pointers or self._on_device:
            self._exchange(copies)
            try:
                yield
            finally:
                self._exchange(copies)
            return
        with self._actor_aside():
            for mine, theirs in zip(self._live(), copies, strict=True):
                _copy(mine, theirs)
            _synchronize(self.named)
            yield

    @contextmanager
    def filling(self, tag: str) -> Iterator[None]:
        """Make the weights that are written to the model within the context the copy ``tag``.
        Afterwards the model has the actor's weights again."""
        if self._pointers or self._on_device:
            self.copy(LIVE, tag)
            with self.using(tag):
                yield
            return
        with self._actor_aside():
            yield
            self.copy(LIVE, tag)

    @torch.no_grad()
    def _exchange(self, copies: list[Tensor]) -> None:
        for i, (_, p) in enumerate(self.named):
            if self._pointers:
                p.data, copies[i] = copies[i], p.data
            else:
                mine = local(p.detach())
                # One tensor at a time, so that an exchange needs memory for the largest tensor
                # only, and not for a whole copy.
                before = mine.clone()
                mine.copy_(copies[i])
                copies[i].copy_(before)

    @contextmanager
    def _actor_aside(self) -> Iterator[None]:
        """Keep the tensors of the model in the arena within the context."""
        # The tensors of the model lie one behind the other in the arena, behind what the offloader
        # holds there.
        live = [_bytes(tensor) for tensor in self._live()]
        if self._arena is None:
            self._arena = HostArena(pinned=any(tensor.is_cuda for tensor in live))
        arena = self._arena
        arena.reserve(arena.held + sum(tensor.numel() for tensor in live))
        starts = [arena.held]
        for tensor in live:
            starts.append(starts[-1] + tensor.numel())
        pairs = [
            pair
            for start, tensor in zip(starts, live, strict=False)
            for pair in arena.pieces(start, tensor)
        ]
        with torch.no_grad():
            for host, device in pairs:
                host.copy_(device, non_blocking=True)
        try:
            yield
        finally:
            with torch.no_grad():
                for host, device in pairs:
                    device.copy_(host, non_blocking=True)
            _synchronize(self.named)

    def tensors(self, tag: str) -> dict[str, Tensor]:
        """Return this rank's shards of a copy by parameter name. They are not copied."""
        return {
            name: tensor for (name, _), tensor in zip(self.named, self._require(tag), strict=True)
        }


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy with a cast on the accelerator, so that the only transfer is asynchronous and in the
    narrower dtype.
    """
    if target.is_cuda and not source.is_cuda:
        source = source.to(target.device, non_blocking=True)
    elif source.is_cuda and not target.is_cuda:
        source = source.to(target.dtype)
    target.copy_(source, non_blocking=True)


def _synchronize(named: Sequence[NamedTensor]) -> None:
    if any(p.is_cuda for _, p in named):
        torch.cuda.synchronize()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def shard_of(full: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of ``full``, which is sharded like ``like``."""
    if not isinstance(like, DTensor):
        return full
    for axis, (offset, size) in enumerate(zip(*shard_box(like), strict=True)):
        full = full.narrow(axis, min(offset, full.shape[axis]), size)
    return full


def shard_box(like: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of this rank's shard in the whole tensor."""
    sizes, offsets = compute_local_shape_and_global_offset(
        like.shape, like.device_mesh, like.placements
    )
    return tuple(offsets), tuple(sizes)


@dataclass(frozen=True)
class CopySettings:
    """The copies of the weights that an actor has, and where they are loaded from."""

    ref: bool
    ref_load: str | None
    """None for the weights with which training starts."""
    ref_moves: bool
    """Whether the reference is refreshed during the run (``--ref-update-interval``)."""
    teacher_load: str | None
    """None if the trainer has no teacher."""
    old_actor: bool
    shares_device: bool
    """Whether engines use the same accelerator."""

    @classmethod
    def of(
        cls,
        needs: TrainNeeds,
        saved: CheckpointConfig,
        gpus: ClusterConfig,
        ref_moves: bool,
        teacher: str | None,
    ) -> CopySettings:
        return cls(
            ref=needs.ref_log_probs,
            ref_load=weights_path(saved.ref_load, saved.ref_ckpt_step),
            ref_moves=ref_moves,
            teacher_load=weights_path(teacher) if needs.teacher_log_probs else None,
            old_actor=needs.old_actor,
            shares_device=gpus.colocate or gpus.offload_train,
        )


def keeps_copies_on_device(
    settings: CopySettings, named: Sequence[NamedTensor], free_bytes: int | None = None
) -> bool:
    """Return whether the copies stay on the accelerator, and log it.

    This is a collective operation, because the ranks may have different amounts of free memory but
    must all keep their copies in the same place. Copies never stay on an accelerator that the
    trainer shares with engines, which need the memory.

    Args:
        named: The parameters of the model, or those on this rank of an accelerator. Its optimizer
            must exist already.
        free_bytes: The free memory of the accelerator; measured by default.
    """
    # The old actor counts twice, since it is refreshed by way of a second copy.
    count = settings.ref + (settings.teacher_load is not None) + 2 * settings.old_actor
    if not count or settings.shares_device:
        return False
    if free_bytes is None:
        # A pipeline stage may train nothing of an adapter. It must take part below, because the
        # other stages do.
        if named and not any(p.is_cuda for _, p in named):
            return False
        free_bytes = torch.cuda.mem_get_info()[0]
    needed = count * sum(local(p.detach()).nbytes for _, p in named)
    fits = torch.tensor(needed <= DEVICE_SHARE * free_bytes, dtype=torch.uint8)
    if dist.is_initialized():
        dist.all_reduce(fits, dist.ReduceOp.MIN)
    logger.warning(
        "copies of the weights (reference, teacher, old actor) take %.2f GiB and stay %s: %.2f "
        "GiB are free there",
        needed / 2**30,
        "on the accelerator" if fits else "in CPU memory",
        free_bytes / 2**30,
    )
    return bool(fits)


def load_copies(
    settings: CopySettings,
    bank: WeightBank,
    initial: str,
    load: Callable[[str, str], None],
    adapter: bool = False,
) -> None:
    """Make the copies that the flags require.

    Args:
        bank: The copies of what is trained.
        initial: The path of the weights in the model. A reference with the same path is copied and
            not read again.
        load: ``load(tag, path)`` reads the weights of a whole model at ``path`` into the copy
            ``tag``.
        adapter: Whether an adapter is trained. The reference is the base without it, so that it
            needs a copy only if it is refreshed, or if it has another base.
    """
    if settings.ref and settings.ref_load and settings.ref_load != initial:
        load("ref", settings.ref_load)
    elif settings.ref and (settings.ref_moves or not adapter):
        bank.copy(LIVE, "ref")
        # Without an adapter on the layer B is 0, so the copy computes what the base does.
        for name, tensor in bank.tensors("ref").items() if adapter else ():
            if name.endswith(".lora_B"):
                tensor.zero_()
    if "ref" in bank.copies and settings.ref_moves:
        bank.moving.add("ref")
    if settings.teacher_load is not None:
        load("teacher", settings.teacher_load)
    if settings.old_actor:
        bank.copy(LIVE, "old_actor")
        bank.moving.add("old_actor")
