"""``--rm-type rubric``: several judges and functions with weights, some of them required, from a
file.
"""

from __future__ import annotations

import asyncio
import copy
import math
from typing import TYPE_CHECKING

from slime.data.rewards import PARTS_KEY
from slime.data.sample import Sample
from slime.plugins.rewards import PASS, Item, read_rubric
from slime.plugins.rewards.servers import judge_group
from slime.rollout.metrics import known_reward
from slime.rollout.rm_hub.dispatch import async_rm
from slime.rollout.rm_hub.outcome import ABSTAINED, FAILURE_KEY, failure, mark_unscored
from slime.rollout.rm_hub.reward import Reward

if TYPE_CHECKING:
    from slime.config.args import Args


def check(args: Args) -> list[str]:
    """Return what keeps the rubric from working."""
    if args.rubric is None:
        return ["--rm-type rubric needs --rubric, the file of its items"]
    try:
        items = read_rubric(args.rubric)
    except (OSError, ValueError):
        return []  # resolve tells it
    if args.rm_url is None and any(item.judge for item in items):
        return [f"--rubric {args.rubric}: an item has a judge, which needs --rm-url"]
    return []


async def score(args: Args, sample: Sample) -> float | None:
    """Return the weighted mean of the items, or 0 where a required one fails.

    An item that abstains is left out of the mean. The sample has no reward if an item has none for
    another reason, or if all abstain. ``metadata["reward_parts"]`` gets the rewards of the items.
    """
    items = read_rubric(args.rubric or "")
    asked = [_asked(sample, item) for item in items]

    async def value(one: Sample, item: Item) -> float | None:
        if item.judge is not None:
            return (await judge_group([one], item.judge, args, model=args))[0]
        one.reward = await async_rm(args, one)
        return known_reward(one, args.reward_key)

    values = await asyncio.gather(*map(value, asked, items))
    for one in asked:
        if failure(one) not in ("", ABSTAINED):
            status, _, detail = str(one.metadata[FAILURE_KEY]).partition(": ")
            mark_unscored(sample, status, detail)
            return None
    known = {item: value for item, value in zip(items, values, strict=True) if value is not None}
    sample.metadata[PARTS_KEY] = {item.name: value for item, value in known.items()}
    if not known:
        return None
    if any(item.required and value < PASS for item, value in known.items()):
        return 0.0
    return math.fsum(item.weight * value for item, value in known.items()) / math.fsum(
        item.weight for item in known
    )


def _asked(sample: Sample, item: Item) -> Sample:
    """Return a copy of the sample that is scored by the item."""
    asked = copy.copy(sample)
    asked.metadata = {**sample.metadata, "rm_type": item.rm_type or ""}
    asked.custom_rm_path = item.path or ""
    return asked


RUBRIC = Reward(score, reads_reasoning=True, own_answer=None, check=check)
