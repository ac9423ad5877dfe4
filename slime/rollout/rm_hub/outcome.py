"""What a reward that could not be computed means for its sample: it is marked, never scored 0."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from slime.data.sample import Sample
from slime.rollout.verifier import Verdict, shared_pool

if TYPE_CHECKING:
    from slime.config.args import Args

logger = logging.getLogger(__name__)
FAILURE_KEY = "reward_failure"
_warned: set[str] = set()


def mark_unscored(sample: Sample, status: str, detail: str) -> None:
    """Take ``sample`` out of its group's statistics and of the loss, and say why in ``metadata["reward_failure"]``.

    Args:
        status: ``timeout``, ``crashed`` or ``error``.
    """
    sample.reward = None
    sample.reward_timed_out = True
    sample.remove_sample = True
    sample.metadata[FAILURE_KEY] = f"{status}: {detail}"
    if status not in _warned:
        _warned.add(status)
        logger.warning(
            "no reward for sample %s: verifier %s (%s). It is left out of group statistics and loss; "
            "later ones are only counted (rollout/reward_timeout_count, rollout/reward_error_count).",
            sample.index,
            status,
            detail,
        )


async def verify(args: Args, sample: Sample, function: str, *call_args: Any) -> Any:
    """Run a verifier in the pool under ``--reward-timeout``; without a result, mark the sample and return None."""
    verdict: Verdict = await shared_pool(args.reward_workers).run(function, *call_args, timeout=args.reward_timeout)
    if verdict.ok:
        return verdict.value
    mark_unscored(sample, verdict.status, verdict.detail)
    return None
