"""A training step on a tiny policy: slime's conversion, schedule, packs, advantages and loss, with
a table of logits in place of the model.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from slime.backends.base import Metrics, ModelTag, TrainBackend
from slime.backends.collectives import DataParallelReduce
from slime.backends.loss_inputs import Scores
from slime.backends.shared import SharedBackend
from slime.backends.train_loop import train_on_rollout
from slime.config.args import Args
from slime.config.layout import ParallelLayout
from slime.data.convert import parts_of_ranks
from slime.data.fields import RankBatch, to_rank_batch
from slime.data.packing import build_pack
from slime.data.sample import Group
from slime.plugins.tools.check_algo.world import PROMPT, TOOL, Response, World

SECONDS = 60.0
"""How long a rank waits for another one, which may have failed."""


class Exchange:
    """Lets the threads of several ranks see each other's values."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=SECONDS)
        self.slots: list[object] = [None] * ranks

    def all(self, rank: int, value: object) -> list[object]:
        """Return the values of all ranks, in their order."""
        self.slots[rank] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()  # before anyone writes again
        return found


@dataclass(frozen=True)
class ThreadReduce(DataParallelReduce):
    """The sums of :class:`DataParallelReduce` over ranks that are threads of this process."""

    rank: int = 0
    exchange: Exchange = field(default_factory=lambda: Exchange(1))

    def over_data(self, x: Tensor) -> Tensor:
        parts = self.exchange.all(self.rank, x.detach().clone())
        return torch.stack([part for part in parts if isinstance(part, Tensor)]).sum(0)

    def _reduced(self, values: list[float], op: ReduceOp.RedOpType) -> list[float]:
        rows = np.array(self.exchange.all(self.rank, list(values)), dtype=np.float64)
        return (rows.max(0) if op == ReduceOp.MAX else rows.sum(0)).tolist()


class TableBackend(SharedBackend):
    """One data-parallel rank whose models are tables of logits.

    Attributes:
        table: The trained policy, ``[states, actions]``. Its gradient is that of the loss.
        by_sample: After a step, −∂loss/∂log π of each response token, by ``Sample.index``.
    """

    def __init__(
        self, args: Args, world: World, tables: dict[str, Tensor], reduce: DataParallelReduce
    ) -> None:
        rank = reduce.rank if isinstance(reduce, ThreadReduce) else 0
        super().__init__(args, "actor", rank, reduce.world_size, torch.device("cpu"))
        self.adapter = None
        self.reduce = self.share_reduce = reduce
        self.world = world
        self.tables = tables
        self.table = tables["actor"].clone().requires_grad_()
        self.values_of = world.values(tables["actor"])
        self.by_sample: dict[int, Tensor] = {}

    def log_probs(
        self,
        batch: RankBatch,
        model: ModelTag = "actor",
        with_entropy: bool = False,
        temperature: float | None = None,
    ) -> dict[str, list[Tensor]]:
        """Score the response tokens of all samples; see :meth:`TrainBackend.log_probs`."""
        table = self.table.detach() if model == "actor" else self.tables[model]
        if temperature is not None:
            table = table * (self.needs.temperature / temperature)
        scores, _ = self._scores(batch, range(len(batch["tokens"])), table)
        lengths = [int(n) for n in batch["response_lengths"]]
        found = {"log_probs": scores.log_probs, "entropy": scores.entropy if with_entropy else None}
        return {name: list(x.split(lengths)) for name, x in found.items() if x is not None}

    def add_values(self, batch: RankBatch) -> None:
        """Set ``old_values``, which are those of an ideal critic of the current policy."""
        batch["old_values"] = [
            self.values_of[[row for row, _ in self._rows(tokens.tolist())][-length - 1 : -1]]
            for tokens, length in zip(batch["tokens"], batch["response_lengths"], strict=True)
        ]

    def train_step(self, batch: RankBatch, step: int) -> Metrics:
        """Add the gradients of this rank's micro-batches to the table; nothing is updated."""
        _, trained = self.scheduled_and_trained(batch, step)
        shares: dict[str, float] = {}
        for indices in trained:
            scores, targets = self._scores(batch, indices, self.table)
            assert scores.log_probs is not None
            scores.log_probs.retain_grad()
            loss, metrics = self.share_of_loss(batch, indices, step, scores, targets, None)
            if loss.requires_grad:
                loss.backward()
            self.add_shares(shares, metrics)
            gradient = scores.log_probs.grad
            if gradient is not None:
                parts = gradient.split([int(batch["response_lengths"][i]) for i in indices])
                for i, part in zip(indices, parts, strict=True):
                    self.by_sample[int(batch["sample_indices"][i])] = -part
        return shares

    def _rows(self, tokens: Sequence[int]) -> list[tuple[int, Response]]:
        """Return the state after each token of a sample: its row, and the state itself."""
        state: Response = ()
        rows = []
        for token in tokens:
            if token >= PROMPT:
                state = (token - PROMPT,)
            elif token != TOOL:
                state = (*state, token)
            rows.append((self.world.states.get(state, 0), state))
        return rows

    def _scores(
        self, batch: RankBatch, indices: Sequence[int], table: Tensor
    ) -> tuple[Scores, Tensor]:
        """Score a micro-batch as a model does: one pack, in which a group shares its prompt."""
        layout = build_pack(
            [batch["tokens"][i] for i in indices],
            [int(batch["response_lengths"][i]) for i in indices],
            [batch["group_indices"][i] for i in indices],
            self.packing.shares_prompts,
        )
        states = torch.zeros(len(layout.tokens), dtype=torch.int64)
        for sample in range(len(indices)):
            rows = layout.rows_of(sample)
            own = self._rows(layout.tokens[rows].tolist())
            states[torch.from_numpy(rows)] = torch.tensor([row for row, _ in own])
        logits = table[states[torch.from_numpy(layout.logit_index)]] / self.needs.temperature
        targets = torch.from_numpy(layout.targets).clamp(max=self.world.actions - 1)
        log_p = logits.log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        scores = Scores(
            log_p.gather(-1, targets[:, None]).squeeze(-1),
            entropy if self.needs.entropy_grad else entropy.detach(),
            logits if self.needs.logits else None,
        )
        return scores, targets


@dataclass
class Step:
    """What one training step computed.

    Attributes:
        gradient: −∂loss/∂table, so that it points where the step goes, ``[states, actions]``.
        by_sample: −∂loss/∂log π of each response token, by ``Sample.index``.
        metrics: The metrics of the step, of rank 0.
    """

    gradient: Tensor
    by_sample: dict[int, Tensor]
    metrics: Metrics


class Trainer:
    """Runs steps of one setting, each from the same weights.

    Args:
        args: The settings; ``args.world_size`` ranks train.
        tables: The logits of ``actor``, and of ``ref`` and ``teacher`` where the flags need them.
    """

    def __init__(self, args: Args, world: World, tables: dict[str, Tensor]) -> None:
        self.args = args
        self.layout = ParallelLayout.from_args(args)
        ranks = args.world_size
        device = torch.device("cpu")
        self.exchange = Exchange(ranks)
        reduces = [
            DataParallelReduce(1, device)
            if ranks == 1
            else ThreadReduce(ranks, device, rank=rank, exchange=self.exchange)
            for rank in range(ranks)
        ]
        self.ranks = [TableBackend(args, world, tables, reduce) for reduce in reduces]

    def step(self, groups: Sequence[Group]) -> Step:
        """Train on the samples of a rollout, and return the sums over ranks."""
        parts = list(parts_of_ranks(self.args, groups, 0, self.layout))
        if len(self.ranks) == 1:
            metrics = [self._train(self.ranks[0], to_rank_batch(parts[0]))]
        else:
            with ThreadPoolExecutor(len(self.ranks)) as pool:
                metrics = list(pool.map(self._train, self.ranks, map(to_rank_batch, parts)))
        by_sample = {i: x for rank in self.ranks for i, x in rank.by_sample.items()}
        gradients = [rank.table.grad for rank in self.ranks]
        total = sum((-g for g in gradients if g is not None), torch.zeros_like(self.ranks[0].table))
        return Step(total.detach(), by_sample, metrics[0])

    def _train(self, rank: TableBackend, batch: RankBatch) -> Metrics:
        rank.table.grad = None
        rank.by_sample = {}
        if self.args.use_critic:
            rank.add_values(batch)
        try:
            # A table has all that a step calls, but neither files nor weights to send.
            return train_on_rollout(cast(TrainBackend, rank), self.args, batch)[0]
        except BaseException:
            self.exchange.barrier.abort()  # the other ranks must not wait for this one
            raise
