"""Reward ``remote_rm``: POST ``{prompt, response, label}`` to ``--rm-url``; the answer's JSON body is the reward."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from slime.data.sample import Sample
from slime.rollout.rm_hub.outcome import mark_unscored

logger = logging.getLogger(__name__)
TRIES = 10
FIRST_PAUSE = 0.5  # seconds, doubled after each failure
LONGEST_PAUSE = 30.0


async def remote_reward(args: Any, sample: Sample) -> Any:
    """Score one sample. A server that never answers in time leaves the sample without a reward (marked).

    Raises:
        ValueError: no ``--rm-url``.
        RuntimeError: the server refused or failed in all tries.
    """
    if not args.rm_url:
        raise ValueError("--rm-type remote_rm needs --rm-url, the address of the reward server")
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    return await ask(args, sample, args.rm_url, payload)


async def ask(args: Any, sample: Sample, url: str, payload: dict[str, Any]) -> Any:
    """POST with :data:`TRIES` tries, exponential back-off and ``--reward-timeout`` for each."""
    from slime.engines.http import HttpError, post

    limit = float(getattr(args, "reward_timeout", None) or 30.0)
    error: Exception | None = None
    for attempt in range(TRIES):
        if attempt:
            await asyncio.sleep(min(FIRST_PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE))
        try:
            async with asyncio.timeout(limit):
                return await post(url, payload, max_retries=0)
        except (HttpError, TimeoutError) as caught:
            status = getattr(caught, "status", None)
            if status is not None and status < 500:
                raise
            error = caught
            logger.debug("reward server %s, try %d of %d: %s", url, attempt + 1, TRIES, caught)
    if isinstance(error, TimeoutError):
        mark_unscored(sample, "timeout", f"{url} did not answer within {limit:g} s in {TRIES} tries")
        return None
    raise RuntimeError(f"reward server {url} failed {TRIES} times; last: {error}") from error
