"""The samples that :mod:`slime.data.lock_step` packs: their tokens and costs, and the prompts that they share."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Items:
    """The samples of one optimizer step.

    ``tokens`` and ``costs`` refer to whole samples. Samples with the same key in ``prompts`` can store their prompt
    once per micro-batch, so each further one saves ``prompt_tokens`` and ``prompt_costs``. The key ``None`` means that
    a sample shares its prompt with no other. Costs are positive numbers in any unit.
    """

    tokens: Sequence[int]
    costs: Sequence[float]
    prompts: Sequence[Hashable | None]
    prompt_tokens: Sequence[int]
    prompt_costs: Sequence[float]

    def take(self, part: range) -> Items:
        """Consecutive samples."""
        cut = slice(part.start, part.stop)
        return Items(
            self.tokens[cut], self.costs[cut], self.prompts[cut], self.prompt_tokens[cut], self.prompt_costs[cut]
        )

    def size(self, members: Sequence[int]) -> tuple[int, float]:
        """Tokens and cost of samples in one micro-batch; a shared prompt counts once."""
        tokens, cost = sum(self.tokens[i] for i in members), sum(self.costs[i] for i in members)
        seen: set[Hashable] = set()
        for i in members:
            key = self.prompts[i]
            if key is not None and key in seen:
                tokens -= self.prompt_tokens[i]
                cost -= self.prompt_costs[i]
            elif key is not None:
                seen.add(key)
        return tokens, cost


@dataclass(frozen=True)
class Samples:
    """:class:`Items` as arrays ``[n]``.

    Attributes:
        keys: Number of each sample's prompt; a prompt that is not shared has a number of its own.
        saved_tokens, saved_costs: What a sample saves in a micro-batch that already stores its prompt.
        shares: Whether any two samples have the same prompt.
    """

    tokens: np.ndarray
    costs: np.ndarray
    keys: np.ndarray
    saved_tokens: np.ndarray
    saved_costs: np.ndarray
    shares: bool

    @classmethod
    def of(cls, items: Items) -> Samples:
        numbers: dict[Hashable, int] = {}
        named = [("own", i) if key is None else ("shared", key) for i, key in enumerate(items.prompts)]
        keys = np.asarray([numbers.setdefault(name, len(numbers)) for name in named], np.int64)
        return cls(
            np.asarray(items.tokens, np.int64),
            np.asarray(items.costs, np.float64),
            keys,
            np.asarray(items.prompt_tokens, np.int64),
            np.asarray(items.prompt_costs, np.float64),
            shares=len(numbers) < len(keys),
        )

    def least_tokens(self, cap: int) -> float:
        """Lower bound of the tokens that any schedule stores, if a prompt is stored once per ``cap`` tokens."""
        return float(self._least(self.tokens, self.saved_tokens, cap))

    def least_cost(self, cap: int) -> float:
        return float(self._least(self.costs, self.saved_costs, cap))

    def _least(self, sizes: np.ndarray, saved: np.ndarray, cap: int) -> np.floating:
        if not self.shares:
            # A sample longer than the cap is alone in a micro-batch, so it uses up exactly one.
            return np.minimum(sizes, cap).sum() if sizes is self.tokens else sizes.sum()
        # A sample longer than the cap is alone, also if it shares a prompt. It may even share more than the cap.
        alone = self.tokens > cap
        whole = cap * alone.sum() if sizes is self.tokens else sizes[alone].sum()
        keys, saved, saved_tokens = self.keys[~alone], saved[~alone], self.saved_tokens[~alone]
        # For each prompt: its responses, plus the prompt once for each micro-batch that they need at least. Beside the
        # prompt, a micro-batch has room for ``cap - prompt`` response tokens.
        prompts, once = np.zeros(self.keys.max() + 1), np.zeros(self.keys.max() + 1)
        prompts[keys], once[keys] = saved_tokens, saved
        tokens = np.bincount(keys, self.tokens[~alone] - saved_tokens, len(once))
        own = tokens if sizes is self.tokens else np.bincount(keys, sizes[~alone] - saved, len(once))
        return whole + (own + np.maximum(np.ceil(tokens / np.maximum(cap - prompts, 1)), 1) * once).sum()
