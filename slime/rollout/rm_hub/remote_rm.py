"""Reward ``remote_rm``: POST ``{prompt, response, label}`` to ``--rm-url``; the answer's JSON body is the reward."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Any

from slime.data.sample import Sample
from slime.rollout.rm_hub.outcome import mark_unscored

if TYPE_CHECKING:
    from slime.config.args import Args

logger = logging.getLogger(__name__)
TRIES = 10
FIRST_PAUSE = 0.5  # seconds, doubled after each failure
LONGEST_PAUSE = 15.0
UNKNOWN_SERVER_SECONDS = 300.0  # a server that has never answered is more likely a wrong address than a restart
_FIRST_REPORT = 10.0  # seconds of an outage after which it is reported, then after twice as many each time


async def remote_rm_reward(args: Args, sample: Sample) -> Any:
    """Score one sample; see :func:`ask`.

    Raises:
        ValueError: no ``--rm-url``.
    """
    if not args.rm_url:
        raise ValueError("--rm-type remote_rm needs --rm-url, the address of the reward server")
    payload: dict[str, object] = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    return await ask(args, sample, args.rm_url, payload)


async def ask(args: Args, sample: Sample, url: str, payload: dict[str, object]) -> Any:
    """POST and wait for a server that is away, as for engines: connection errors, 5xx, 408 and 429 are tried again for
    ``--phase-timeout`` seconds, with exponential back-off; the wait is reported.

    None, and the sample marked, where the sample is the likely cause: in :data:`TRIES` tries there was no answer within
    ``--reward-timeout``, or the server failed on it while it answered other requests.

    Raises:
        HttpError: the server refused the request.
        RuntimeError: the server was away for too long.
    """
    from slime.engines.http import HttpError, request

    limit = args.reward_timeout
    server = _servers.setdefault(url, _Server(url))
    begun, pause, timeouts, faults = time.monotonic(), FIRST_PAUSE, 0, 0
    while True:
        retry_after = 0.0
        try:
            async with asyncio.timeout(limit):
                answer = await request("POST", url, payload, timeout=2 * limit)
            server.answered()
            return answer
        except TimeoutError:
            timeouts += 1
            if timeouts >= TRIES:
                mark_unscored(sample, "timeout", f"{url} did not answer within {limit:g} s in {TRIES} tries")
                return None
        except HttpError as error:
            if not error.retryable:
                raise
            faults += error.is_fault
            if faults >= TRIES and server.last_answer > begun:
                mark_unscored(sample, "error", f"{url} failed {faults} times on this sample; last: {error}")
                return None
            unknown = server.last_answer == float("-inf")
            patience = min(args.phase_timeout, UNKNOWN_SERVER_SECONDS) if unknown else args.phase_timeout
            server.failed(error, time.monotonic() - begun, patience)
            retry_after = error.retry_after or 0.0
        await asyncio.sleep(max(pause * random.uniform(0.75, 1.25), retry_after))
        pause = min(2 * pause, LONGEST_PAUSE)


class _Server:
    """What the requests to one server know of it together."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.last_answer = float("-inf")
        self._away_since: float | None = None
        self._next_report = _FIRST_REPORT

    def answered(self) -> None:
        self.last_answer = time.monotonic()
        if self._next_report > _FIRST_REPORT and self._away_since is not None:
            logger.warning("reward server %s answers again after %.0f s", self.url, self.last_answer - self._away_since)
        self._away_since, self._next_report = None, _FIRST_REPORT

    def failed(self, error: Exception, waited: float, patience: float) -> None:
        """Report an outage from time to time; raises ``RuntimeError`` where a request has waited for ``patience``."""
        now = time.monotonic()
        self._away_since = now if self._away_since is None else self._away_since
        if waited > patience:
            raise RuntimeError(
                f"reward server {self.url} has failed for {waited:.0f} s (tried for {patience:g} s; a server that has "
                f"answered before is waited for as long as --phase-timeout says); last: {error}"
            ) from error
        if now - self._away_since >= self._next_report:
            self._next_report *= 2
            away = now - self._away_since
            logger.warning("waiting for the reward server %s, which has failed for %.0f s: %s", self.url, away, error)


_servers: dict[str, _Server] = {}
