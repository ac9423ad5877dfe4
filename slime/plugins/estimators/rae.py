"""RAE: a moving mean of the rewards of each role is the baseline, for games of a model with itself.

Where one player's gain is the other's loss, the mean of a group says nothing about either. A sample
says its role in ``metadata["role"]``, which the generate function sets; a data set of a mixture has
roles of its own, as a game has in the paper.

Source: SPIRAL (arXiv 2506.24119), role-conditioned advantage estimation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algorithms.algorithm import Entries, Row
from slime.algorithms.grpo import Grpo, get_grpo_returns
from slime.config.flag import flag
from slime.config.rollout import OWN_FUNCTIONS

if TYPE_CHECKING:
    from torch import Tensor

    from slime.config.args import Args
    from slime.data.sample import Group
    from slime.data.source import DataSource

BASELINES = "rae"
"""The entry of the metadata of the data source with the baseline of each role."""
BASELINE = "rae_baseline"
"""The entry of ``Sample.train_metadata`` with the baseline of this sample."""


@dataclass
class RaeFlags:
    _title = "estimator rae"

    rae_decay: float = flag(0.95, low=0, high=1)
    """Share of the baseline of a role that each further reward of it leaves"""


def moved(baseline: float, reward: float, decay: float) -> float:
    """Return decay · b + (1 − decay) · r. The paper's b begins at 0."""
    return decay * baseline + (1 - decay) * reward


def remember(args: Args, source: DataSource, event: str, group: Group) -> None:
    """Move the baselines with the rewards of a group that will be trained, and note those of its
    samples. They are in the snapshot with the data source.
    """
    from slime.data.sample import flatten
    from slime.data.source import RolloutDataSource

    if event != "accepted":
        return
    if not isinstance(source, RolloutDataSource):
        raise TypeError(
            "--advantage-estimator rae keeps its baselines with the data source, and the class of "
            f"--data-source-path, {type(source).__name__}, does not derive from RolloutDataSource"
        )
    baselines: dict[str, float] = source.metadata.setdefault(BASELINES, {})
    for sample in flatten(group):
        game, role = (str(sample.metadata.get(name, "")) for name in ("source_name", "role"))
        key = f"{game}/{role}"
        reward = None if sample.reward_timed_out else sample.get_reward_value(args)
        if reward is not None:
            baselines[key] = moved(baselines.get(key, 0.0), float(reward), args.rae_decay)
        noted = {BASELINE: baselines.get(key, 0.0)}
        sample.train_metadata = {**(sample.train_metadata or {}), **noted}


def check(args: Args) -> list[str]:
    """Return what keeps the baselines from being learned."""
    if args.rollout_function_path in OWN_FUNCTIONS:
        return []
    return [
        "--advantage-estimator rae and a --rollout-function-path of your own exclude each other: it "
        "tells nobody which groups it accepts"
    ]


class Rae(Grpo):
    """The reward minus the baseline of the sample's role."""

    needs_group = False
    row = Row(
        "r − b of the sample's role, b ← α·b + (1 − α)·r with each reward of the role, before it is "
        "subtracted",
        "clipped ρ",
        '`metadata["role"]` of samples; `--rae-decay` α',
        "arXiv 2506.24119, SPIRAL",
    )

    def group_baseline(self, rewards: Sequence[float]) -> Sequence[float]:
        return rewards

    def advantages(self, batch: Entries) -> tuple[list[Tensor], list[Tensor]]:
        """Return advantages and returns, which are equal."""
        noted = batch.get("metadata") or [None] * len(batch["rewards"])
        rewards = [
            reward - (one or {}).get(BASELINE, 0.0)
            for reward, one in zip(batch["rewards"], noted, strict=True)
        ]
        returns = get_grpo_returns(rewards, batch["kl"])
        return returns, [x.clone() for x in returns]
