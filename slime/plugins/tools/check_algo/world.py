"""Tiny worlds: prompts whose every response is known, so that expectations are sums.

A policy is a table of logits, float64 ``[states, actions]``. A state is a prompt and the actions
taken so far; the first action of the vocabulary goes on, and in some worlds the others end a
response.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

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
        found = torch.zeros(len(self.states), dtype=torch.float64)
        for (prompt, *prefix), row in self.states.items():
            inside = [i for i, y in enumerate(self.responses) if [*y[: len(prefix)]] == prefix]
            total = math.fsum(chances[prompt][i] for i in inside)
            reward = math.fsum(chances[prompt][i] * self.rewards[prompt][i] for i in inside)
            found[row] = reward / total
        return found

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
