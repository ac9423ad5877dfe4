"""One prompt, three kinds of agents, several samples that train: solvers, rewriters, a selector.

``generate`` is for ``--custom-generate-function-path``, ``by_role`` for
``--custom-reward-post-process-path``. All agents are the model that is trained; each gets the
advantage that its own kind of work earned.
"""

from __future__ import annotations

import asyncio
import copy
import re
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from slime.algorithms.baselines import standardized
from slime.config.seeds import derive_seed
from slime.data.sample import Sample, flatten
from slime.rollout.generate import generate as ask_engine
from slime.rollout.rm_hub import async_rm

SOLVERS = 2
REWRITERS = 2
REWRITE = "{question}\nFriends said:\n{answers}\nSay the right answer."
SELECT = "{question}\nFriends said:\n{answers}\nWho is right? Reply with one number, 1 to {count}."


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Solve in parallel, rewrite in parallel with the solutions at hand, select one of the
    rewritten answers.

    Returns:
        All agents' samples, siblings of one rollout; in evaluation the selected answer alone.
    """
    team = Team(args, sample, sampling_params)
    solved = await asyncio.gather(*(team.ask("solver", i) for i in range(SOLVERS)))
    rewrite = REWRITE.format(question=team.question, answers=numbered(solved))
    rewritten = await asyncio.gather(*(team.ask("rewriter", i, rewrite) for i in range(REWRITERS)))
    select = SELECT.format(
        question=team.question, answers=numbered(rewritten), count=len(rewritten)
    )
    selector = await team.ask("selector", 0, select)
    chosen = choice(selector.response, rewritten)
    if evaluation:
        return chosen if chosen is not None else rewritten[0]
    everybody = [*solved, *rewritten, selector]
    if all(part.status is not Sample.Status.ABORTED for part in everybody):
        # the others are judged by --rm-type
        selector.reward = 0.0 if chosen is None else await async_rm(args, chosen)
    return everybody


class Team:
    """Requests for one sample's agents; each has a prompt, a seed and a sample of its own."""

    def __init__(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> None:
        if not isinstance(sample.prompt, list):
            raise ValueError(
                "the agents need a prompt of messages: leave --apply-chat-template out"
            )
        self.args, self.sample, self.params = args, sample, sampling_params
        self.question = str(sample.prompt[-1]["content"])

    async def ask(self, role: str, number: int, words: str | None = None) -> Sample:
        """One agent's answer to the question, or to ``words`` in its place."""
        part = copy.deepcopy(self.sample)
        part.reset_response()
        part.metadata["agent"] = role
        if words is not None:
            part.prompt = [*part.prompt[:-1], {"role": "user", "content": words}]
        params = dict(self.params)
        # one seed for all would make them all say the same
        if params.get("sampling_seed") is not None:
            params["sampling_seed"] = derive_seed(params["sampling_seed"], role, number)
        return await ask_engine(self.args, part, params)


def numbered(answers: Sequence[Sample]) -> str:
    """Answers as a list for a prompt, each in one line."""
    return "\n".join(f"{i}. {' '.join(part.response.split())}" for i, part in enumerate(answers, 1))


def choice(response: str, answers: Sequence[Sample]) -> Sample | None:
    """The answer that the first number of a selector's response names; None where it names none."""
    found = re.search(r"\d+", response)
    number = int(found[0]) if found else 0
    return answers[number - 1] if 1 <= number <= len(answers) else None


def by_role(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """(raw, trained) rewards: GRPO's (r − mean) / (std + 1e-6), over those of a prompt's samples
    with one role.

    Over the whole group a selector would be punished for its work being harder than a solver's.
    """
    raw = [float(sample.get_reward_value(args) or 0.0) for sample in samples]
    peers = defaultdict(list)
    for i, sample in enumerate(samples):
        peers[sample.group_index, sample.metadata["agent"]].append(i)
    trained = [0.0] * len(samples)
    for members in peers.values():
        for i, reward in zip(members, standardized([raw[i] for i in members]), strict=True):
            trained[i] = reward
    return raw, trained


def log_roles(
    rollout_id: int, args: Any, samples: Any, metrics: dict[str, Any], rollout_time: float
) -> bool:
    """Adds each role's mean reward to the metrics (``--custom-rollout-log-function-path``)."""
    rewards = defaultdict(list)
    for sample in flatten(samples):
        rewards[sample.metadata["agent"]].append(float(sample.get_reward_value(args) or 0.0))
    metrics.update(
        {f"multi_agent/{role}_reward": fmean(values) for role, values in sorted(rewards.items())}
    )
    return False
