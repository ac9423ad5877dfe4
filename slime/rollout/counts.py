"""What a rollout counts of its groups."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from slime.data.sample import Sample
from slime.rollout.metrics import known_reward
from slime.rollout.rm_hub.outcome import FAILURE_KEY


@dataclass
class Counts:
    """``dropped`` is by the filter's reason; ``replaced``, ``surplus``, ``aborted`` and ``lost`` are groups,
    ``timed_out`` and ``failed`` samples without a reward."""

    dropped: Counter[str] = field(default_factory=Counter)
    replaced: int = 0
    timed_out: int = 0
    failed: int = 0
    surplus: int = 0
    aborted: int = 0
    lost: int = 0
    tokens: int = 0
    rewards: int = 0
    reward_sum: float = 0.0

    def add(self, args: Any, samples: list[Sample]) -> None:
        """Count the samples of a finished group."""
        for sample in samples:
            self.tokens += sample.response_length
            if sample.reward_timed_out:
                timeout = str(sample.metadata.get(FAILURE_KEY, "timeout")).startswith("timeout")
                self.timed_out += timeout
                self.failed += not timeout
            elif (value := known_reward(args, sample)) is not None:
                self.rewards += 1
                self.reward_sum += value

    def numbers(self) -> dict[str, float]:
        """For the live line."""
        return {"tokens": self.tokens, **({"reward": self.reward_sum / self.rewards} if self.rewards else {})}

    def metrics(self) -> dict[str, float]:
        metrics = {f"rollout/dynamic_filter/drop_{reason}": float(n) for reason, n in sorted(self.dropped.items())}
        metrics["rollout/reward_timeout_count"] = float(self.timed_out)
        metrics["rollout/reward_error_count"] = float(self.failed)
        metrics["rollout/replaced_group_count"] = float(self.replaced)
        metrics["rollout/surplus_group_count"] = float(self.surplus)
        metrics["rollout/aborted_group_count"] = float(self.aborted)
        metrics["rollout/lost_group_count"] = float(self.lost)
        return metrics

    def drop_report(self) -> str:
        """Why groups did not train, in brackets; empty where all did."""
        parts = [f"{n} dropped as {reason}" for reason, n in self.dropped.most_common()]
        if self.replaced:
            parts.append(f"{self.replaced} replaced, their verifiers gave no answer")
        return f" ({'; '.join(parts)})" if parts else ""
