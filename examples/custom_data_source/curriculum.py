"""A data source of one's own: products by difficulty, harder ones once the easier ones are solved.

``--data-source-path examples/custom_data_source/curriculum.py:Curriculum`` with
``--rollout-all-samples-process-path …:learn`` (tells the source what its groups scored) and
``--custom-rollout-log-function-path …:log`` (shows the level).
"""

from __future__ import annotations

import copy
from collections import deque
from random import Random
from typing import Any

from slime.config.seeds import derive_seed
from slime.data.sample import groups_from_dicts, groups_to_dicts
from slime.data.source import load_dataset
from slime.utils.types import Sample

LEVELS = (3, 5, 7, 9)  # largest factor of the products of each level
WINDOW = 32  # samples of the newest level that its solved share is taken over
SOLVED = 0.5  # share from which the next level opens
NEWEST = 0.5  # chance that a prompt is of the newest level; else of any that is open


class Curriculum:
    """Groups of the open levels. Every draw depends on the seed and the number of draws before it,
    so the state is five small values, and a run that resumes goes on with exactly the groups that
    it would have had.

    ``state_dict`` and ``load_state_dict`` put that state inside the run's snapshot; a source with
    ``save(rollout_id)`` and ``load(rollout_id)`` instead would write files of its own.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        # --prompt-data with its chat template, as without this class
        self.dataset = load_dataset(args)
        self.levels: list[list[int]] = [[] for _ in LEVELS]
        for row in range(len(self.dataset)):
            self.levels[level_of(self.dataset[row])].append(row)
        if not all(self.levels):
            raise ValueError(
                f"{args.prompt_data}: the levels up to the factors {LEVELS} need a product each"
            )
        self.level = 0
        self.groups_given = 0
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.buffer: list[Any] = []  # groups that came back unused, or half done

    def __len__(self) -> int:
        return len(self.dataset)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """What came back first, then new groups of ``--n-samples-per-prompt`` copies of a
        prompt.
        """
        back, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
        return back + [self._new_group() for _ in range(num_samples - len(back))]

    def _new_group(self) -> list[Sample]:
        random = Random(derive_seed(self.args.rollout_seed, "curriculum", self.groups_given))
        level = self.level if random.random() < NEWEST else random.randint(0, self.level)
        prompt = self.dataset[random.choice(self.levels[level])]
        size = self.args.n_samples_per_prompt
        group = [copy.deepcopy(prompt) for _ in range(size)]
        for position, sample in enumerate(group):
            sample.group_index, sample.index = (
                self.groups_given,
                self.groups_given * size + position,
            )
            sample.metadata["level"] = level
        self.groups_given += 1
        return group

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Groups that came back: over-sampled, aborted or partial."""
        self.buffer.extend(samples)

    def learn(self, level: int, rewards: list[float]) -> None:
        """Take in what samples of ``level`` scored; opens the next level when the newest one is
        solved.
        """
        if level == self.level:
            self.recent.extend(rewards)
        if (
            len(self.recent) == WINDOW
            and sum(self.recent) / WINDOW >= SOLVED
            and self.level + 1 < len(LEVELS)
        ):
            self.level += 1
            self.recent.clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            "level": self.level,
            "groups_given": self.groups_given,
            "recent": list(self.recent),
            "buffer": groups_to_dicts(self.buffer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level, self.groups_given = state["level"], state["groups_given"]
        self.recent = deque(state["recent"], maxlen=WINDOW)
        self.buffer = groups_from_dicts(state["buffer"])


def level_of(sample: Sample | None) -> int:
    """By the larger of the factors that ``slime make-data products`` writes into the metadata."""
    if sample is None:
        raise ValueError("a prompt was left out for its length: the curriculum needs all of them")
    largest = max(sample.metadata["a"], sample.metadata["b"])
    return next(level for level, limit in enumerate(LEVELS) if largest <= limit)


def learn(args: Any, all_groups: list[list[Sample]], data_source: Curriculum) -> None:
    """``--rollout-all-samples-process-path``: called at the end of each rollout with every
    group.
    """
    for group in all_groups:
        rewards = [float(sample.reward) for sample in group if sample.reward is not None]
        data_source.learn(group[0].metadata["level"], rewards)


def log(
    rollout_id: int, args: Any, samples: list[Sample], metrics: dict[str, Any], rollout_time: float
) -> bool:
    """``--custom-rollout-log-function-path``: adds what the rollout was made of; the usual metrics
    follow.
    """
    levels = [sample.metadata["level"] for sample in samples]
    metrics["rollout/level_max"] = float(max(levels))
    metrics["rollout/level_mean"] = sum(levels) / len(levels)
    return False
