"""Routing replay: a forward pass uses the experts that an earlier pass (R2) or the engine (R3)
chose.

Without it, if the trainer routes a token to other experts than the engine did, its log-prob is that
of another model. The choices of a sample are int16 ``[total_length, layers, top-k]`` for the layers
of this rank. Where a choice is not known, it is −1, and the router chooses. The rank batch has the
choices under the key ``ROUTING``, from the pass that records them to those that replay them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from slime.data.fields import RankBatch
from slime.plugins.megatron.core import MegatronError
from slime.plugins.megatron.model import PolicyModel
from slime.plugins.megatron.schedule import Around, MicroBatch

ROUTING = "routing_choices"
ENGINE = "rollout_routed_experts"
"""The key of the engine's choices, ``[total_length - 1, layers, top-k]`` for each sample."""
Mode = Literal["record", "replay"]
Choose = Callable[..., tuple[Tensor, Tensor]]
"""Megatron's function that chooses experts. It returns scores and experts of each token."""


class LayerReplay:
    """Replaces megatron-core's RouterReplay of one router."""

    def __init__(self) -> None:
        self.mode: Mode | None = None
        self.target: Tensor | None = None
        self.recorded: Tensor | None = None
        self.pending: deque[Tensor] = deque()
        """Targets of forward passes that backward may compute again, oldest first."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute: Choose,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and experts of each token, both ``[T, topk]``."""
        values, own = compute(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.mode == "record":
            self.recorded = own
        target = self.target
        # With activation checkpointing, backward runs the forward pass again, outside of `around`.
        # Backward passes have the order of the forward passes, so the oldest target is the right
        # one.
        if target is None and self.mode != "record" and self.pending:
            target = self.pending.popleft()  # a forward pass that is computed again
        if target is None:
            return values, own
        chosen = torch.where(target >= 0, target.to(own.dtype), own)
        # Only the choice of experts is replayed, not their weights, so that gradients flow through
        # the current scores.
        return scores.gather(1, chosen), chosen


class RoutingReplay:
    """Records and replays the choices of all routers in this rank's model chunks."""

    def __init__(
        self,
        chunks: list[PolicyModel],
        with_experts: list[bool],
        sequence_parallel: bool,
        from_engine: bool,
    ) -> None:
        self.from_engine = from_engine
        self.num_layers = len(with_experts)
        self.expert_layers = [i for i, moe in enumerate(with_experts) if moe]
        self.sequence_parallel = sequence_parallel
        self.layers: list[int] = []
        self.of_chunk: dict[int, list[tuple[int, LayerReplay]]] = {}
        for number, chunk in enumerate(chunks):
            found = self.of_chunk.setdefault(number, [])
            for layer in chunk.decoder.layers:
                if hasattr(layer.mlp, "router"):
                    layer.mlp.router.router_replay = replay = LayerReplay()
                    found.append((len(self.layers), replay))
                    self.layers.append(layer.layer_number - 1)
            chunk.routing_number = number

    @contextmanager
    def during(self, batch: RankBatch, mode: Mode) -> Iterator[Around]:
        """Record or replay in one pass over a batch. The result is the argument ``around`` of
        ``run_schedule``.
        """
        # Choices are kept in the batch, since several passes over it replay those that the first
        # one recorded.
        if self.from_engine and ROUTING not in batch:
            batch[ROUTING] = self._of_engine(batch)
        store: list[np.ndarray | None] = batch.setdefault(ROUTING, [None] * len(batch["tokens"]))

        @contextmanager
        def around(chunk: PolicyModel, micro: MicroBatch) -> Iterator[None]:
            replays = self.of_chunk[chunk.routing_number]
            targets = self._targets(store, micro) if mode == "replay" else None
            for place, replay in replays:
                replay.mode = mode
                if targets is not None:
                    replay.target = targets[:, place]
                    replay.pending.append(replay.target)
            yield
            if mode == "record":
                self._record(batch, store, micro, replays)
            for _, replay in replays:
                replay.mode = replay.target = replay.recorded = None

        # A pass that ended early leaves targets that no backward pass has asked for.
        yield around
        for replays in self.of_chunk.values():
            for _, replay in replays:
                replay.pending.clear()

    def _of_engine(self, batch: RankBatch) -> list[np.ndarray | None]:
        if batch.get(ENGINE) is None:
            raise MegatronError(
                "--use-rollout-routing-replay: the samples have no choices of experts from the "
                "engine"
            )
        store: list[np.ndarray | None] = []
        for routed, total in zip(batch[ENGINE], batch["total_lengths"], strict=True):
            routed = torch.as_tensor(routed)
            if routed.shape[1] == self.num_layers:
                mine = routed[:, self.layers]
            elif routed.shape[1] == len(self.expert_layers):
                mine = routed[:, [self.expert_layers.index(layer) for layer in self.layers]]
            else:
                raise MegatronError(
                    f"the engine chose experts for {routed.shape[1]} layers, but the model has "
                    f"{self.num_layers}, {len(self.expert_layers)} of them with experts"
                )
            choices = np.full((int(total), *mine.shape[1:]), -1, np.int16)
            choices[: len(mine)] = mine.numpy()
            store.append(choices)
        return store

    def _targets(self, store: list[np.ndarray | None], micro: MicroBatch) -> Tensor:
        """Return the choices for this rank's part of the pack, int64 ``[T, layers, top-k]``."""
        positions = micro.positions
        shape = next((x.shape[1:] for x in store if x is not None), (len(self.layers), 1))
        rows = np.full((len(positions), *shape), -1, np.int16)
        for i, mine in zip(micro.indices, micro.sample_rows, strict=True):
            choices = store[i]
            if choices is not None:
                held = mine[positions[mine] < len(choices)]
                rows[held] = choices[positions[held]]
        targets = torch.from_numpy(rows).to(micro.ids.device, torch.int64)
        if self.sequence_parallel:
            group = mpu.get_tensor_model_parallel_group()
            targets = targets.chunk(group.size())[group.rank()]
        return targets

    def _record(
        self,
        batch: RankBatch,
        store: list[np.ndarray | None],
        micro: MicroBatch,
        replays: list[tuple[int, LayerReplay]],
    ) -> None:
        for place, replay in replays:
            assert replay.recorded is not None
            choices = replay.recorded
            if self.sequence_parallel:
                group = mpu.get_tensor_model_parallel_group()
                parts = [torch.empty_like(choices) for _ in range(group.size())]
                dist.all_gather(parts, choices.contiguous(), group=group)
                choices = torch.cat(parts)
            rows = choices.cpu().numpy().astype(np.int16)
            for i, mine in zip(micro.indices, micro.sample_rows, strict=True):
                total = int(batch["total_lengths"][i])
                if store[i] is None:
                    store[i] = np.full((total, len(self.layers), rows.shape[1]), -1, np.int16)
                held = mine[micro.positions[mine] < total]
                store[i][micro.positions[held], place] = rows[held]  # type: ignore[index]
