"""Tiny worlds: prompts whose every response is known, so that expectations are sums; and a training
step in them: slime's conversion, schedule, packs, advantages and loss, with a table of logits in
place of the model.

A policy is a table of logits, float64 ``[states, actions]``. A state is a prompt and the actions
taken so far; the first action of the vocabulary goes on, and in some worlds the others end a
response.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
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

PROMPT = 100
"""The token id of prompt 0. Prompt ``p`` is the single token ``PROMPT + p``."""
TOOL = 50
"""The token id of a tool's output. No policy samples it, and it changes no state."""

Response = tuple[int, ...]
Draw = tuple[tuple[int, ...], ...]
"""For each prompt of a batch, the responses of its group, as positions in ``World.responses``."""


@dataclass(frozen=True)
class World:
    """Prompts and all responses to them.

    Attributes:
        actions: The size of the vocabulary.
        responses: The actions of each response; no response begins another one.
        rewards: One row per prompt, one number per response.
        longest: The limit of the length. A response of this length that ends with action 0 was cut
            off, if responses have different lengths.
    """

    actions: int
    responses: tuple[Response, ...]
    rewards: tuple[tuple[float, ...], ...]
    longest: int

    @property
    def prompts(self) -> int:
        return len(self.rewards)

    @cached_property
    def states(self) -> dict[Response, int]:
        """The row of each state in a table: ``(prompt, action, action, …)``."""
        prefixes = sorted({y[:t] for y in self.responses for t in range(len(y))})
        return {
            (p, *prefix): p * len(prefixes) + i
            for p in range(self.prompts)
            for i, prefix in enumerate(prefixes)
        }

    def is_cut_off(self, response: Response) -> bool:
        return len(response) == self.longest and response[-1] == 0 and self.has_lengths

    @property
    def has_lengths(self) -> bool:
        return len({len(y) for y in self.responses}) > 1

    def log_probs(self, table: Tensor, prompt: int, response: Response) -> Tensor:
        """Return the log-prob of each action of a response, ``[len(response)]``."""
        rows = [self.states[(prompt, *response[:t])] for t in range(len(response))]
        picked = table[rows].log_softmax(-1)
        return picked.gather(-1, torch.tensor(response)[:, None]).squeeze(-1)

    def probabilities(self, table: Tensor) -> Tensor:
        """Return the probability of every response, ``[prompts, responses]``; rows sum to 1."""
        return torch.stack(
            [
                torch.stack([self.log_probs(table, p, y).sum().exp() for y in self.responses])
                for p in range(self.prompts)
            ]
        )

    def true_gradient(self, table: Tensor) -> Tensor:
        """Return the gradient of the expected reward, the mean over prompts, like the table."""
        leaf = table.detach().clone().requires_grad_()
        rewards = torch.tensor(self.rewards, dtype=torch.float64)
        objective = (self.probabilities(leaf) * rewards).sum() / self.prompts
        return torch.autograd.grad(objective, leaf)[0]

    def values(self, table: Tensor) -> Tensor:
        """Return the expected reward from each state on, ``[states]``, as an ideal critic does."""
        chances = self.probabilities(table).tolist()
        expected = torch.zeros(len(self.states), dtype=torch.float64)
        for (prompt, *prefix), row in self.states.items():
            inside = [i for i, y in enumerate(self.responses) if [*y[: len(prefix)]] == prefix]
            total = math.fsum(chances[prompt][i] for i in inside)
            reward = math.fsum(chances[prompt][i] * self.rewards[prompt][i] for i in inside)
            expected[row] = reward / total
        return expected

    def table(self, phase: float, size: float) -> Tensor:
        """Return a fixed table of numbers between ±size without a pattern, the same everywhere."""
        shape = len(self.states), self.actions
        places = torch.arange(math.prod(shape), dtype=torch.float64)
        return size * (2.3 * places + phase).sin().view(shape)


ONE_LENGTH = World(
    2, ((0, 0), (0, 1), (1, 0), (1, 1)), ((1.0, 0.0, 0.5, 0.0), (0.0, 0.0, 0.0, 1.0)), 2
)
"""Two actions, two steps."""
LENGTHS = World(
    3,
    ((1,), (2,), (0, 1), (0, 2), (0, 0)),
    ((0.0, 0.5, 1.0, 0.0, 0.0), (1.0, 0.0, 0.0, 1.0, 0.0)),
    2,
)
"""Two actions end a response; the last response is cut off."""
ONE_TOKEN = World(3, ((0,), (1,), (2,)), ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0)), 1)
"""Responses of one token, where the ratio of a token is that of its response."""


@dataclass(frozen=True)
class Draws:
    """Batches with their weights in the expectation, which sum to 1.

    Attributes:
        exact: Whether these are all batches. Otherwise they were drawn, and weigh the same.
    """

    batches: tuple[Draw, ...]
    weights: np.ndarray
    exact: bool


def groups_of(chances: Sequence[float], size: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield each group of ``size`` responses without regard to order, with its probability."""
    for group in itertools.combinations_with_replacement(range(len(chances)), size):
        orders = math.factorial(size)
        for response in set(group):
            orders //= math.factorial(group.count(response))
        yield group, orders * math.prod(chances[i] for i in group)


def draws(world: World, sampler: Tensor, size: int, limit: int = 1300) -> Draws:
    """Return all batches with one group of ``size`` responses of each prompt.

    Args:
        sampler: The table of the policy that samples.
        limit: If there are more batches than this, so many are drawn instead, by a fixed seed.
    """
    chances = world.probabilities(sampler).tolist()
    count = math.comb(len(world.responses) + size - 1, size) ** world.prompts
    if count <= limit:
        products = itertools.product(*(list(groups_of(row, size)) for row in chances))
        rows = [
            (tuple(g for g, _ in one), math.prod(weight for _, weight in one)) for one in products
        ]
        return Draws(tuple(b for b, _ in rows), np.array([weight for _, weight in rows]), True)
    generator = np.random.default_rng(0)
    columns = [
        generator.choice(len(row), (limit, size), p=np.array(row) / sum(row)) for row in chances
    ]
    batches = tuple(tuple(tuple(map(int, column[i])) for column in columns) for i in range(limit))
    return Draws(batches, np.full(limit, 1 / limit), False)


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
        values = list(self.slots)
        self.barrier.wait()  # before anyone writes again
        return values


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
        scored = {
            "log_probs": scores.log_probs,
            "entropy": scores.entropy if with_entropy else None,
        }
        return {name: list(x.split(lengths)) for name, x in scored.items() if x is not None}

    def add_values(self, batch: RankBatch) -> None:
        """Set ``values``, which are those of an ideal critic of the current policy."""
        batch["values"] = [
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
        self.args = args = args.with_values(train_during_rollout=1)
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
            return train_on_rollout(cast(TrainBackend, rank), batch)[0]
        except BaseException:
            self.exchange.barrier.abort()  # the other ranks must not wait for this one
            raise
