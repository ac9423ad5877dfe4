"""Reward ``remote_rm``: POST ``{prompt, response, label}`` to ``--rm-url``. The reply's JSON body
is the reward.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Any

from slime.data.sample import Sample
from slime.rollout.rm_hub.outcome import mark_unscored
from slime.rollout.rm_hub.reward import Reward

if TYPE_CHECKING:
    from slime.config.args import Args

logger = logging.getLogger(__name__)
TRIES = 10
FIRST_PAUSE = 0.5  # seconds, doubled after each failure
LONGEST_PAUSE = 15.0
# if a server has never replied, its address is probably wrong, so do not wait as long
UNKNOWN_SERVER_SECONDS = 300.0
FIRST_REPORT = 10.0  # seconds after which an outage is reported; doubled after each report


async def remote_rm_reward(args: Args, sample: Sample) -> Any:
    """Score one sample; see :func:`ask`.

    Raises:
        ValueError: ``--rm-url`` is not set.
    """
    if not args.rm_url:
        raise ValueError("--rm-type remote_rm needs --rm-url, the address of the reward server")
    payload: dict[str, object] = {
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
    }
    return await ask(sample, args.rm_url, payload, args.reward_timeout, args.phase_timeout)


async def ask(
    sample: Sample, url: str, payload: dict[str, object], limit: float, longest_outage: float
) -> Any:
    """Send a request to a reward server, and wait for the server if it is unavailable.

    Connection errors and the statuses 5xx, 408 and 429 are retried with exponential backoff for
    ``longest_outage`` seconds (``--phase-timeout``). Long waits are logged.

    Returns:
        The JSON body of the reply. None if the sample is the likely cause of the failure; it is
        then marked as unscored. This is the case after :data:`TRIES` attempts without a reply
        within ``limit`` seconds (``--reward-timeout``), or after as many server errors for this
        sample while the server replied to other requests.

    Raises:
        HttpError: The server refused the request.
        RuntimeError: The server was unavailable for too long.
    """
    from slime.engines.http import HttpError, request

    server = _servers.setdefault(url, _Server(url))
    begun = time.monotonic()
    pause = FIRST_PAUSE
    timeouts = 0
    faults = 0
    while True:
        retry_after = 0.0
        try:
            # Our limit ends first, so that a slow reply is a TimeoutError and not a connection
            # error, which would be retried for much longer.
            async with asyncio.timeout(limit):
                answer = await request("POST", url, payload, timeout=2 * limit)
            server.answered()
            return answer
        except TimeoutError:
            timeouts += 1
            if timeouts >= TRIES:
                mark_unscored(
                    sample, "timeout", f"{url} did not reply within {limit:g} s in {TRIES} attempts"
                )
                return None
        except HttpError as error:
            if not error.retryable:
                raise
            # A server error is blamed on the sample only if the server has replied to another
            # request in the meantime.
            faults += error.is_fault
            if faults >= TRIES and server.last_answer > begun:
                mark_unscored(
                    sample,
                    "error",
                    f"{url} failed {faults} times on this sample; the last error: {error}",
                )
                return None
            unknown = server.last_answer == float("-inf")
            patience = min(longest_outage, UNKNOWN_SERVER_SECONDS) if unknown else longest_outage
            server.failed(error, time.monotonic() - begun, patience)
            retry_after = error.retry_after or 0.0
        await asyncio.sleep(max(pause * random.uniform(0.75, 1.25), retry_after))
        pause = min(2 * pause, LONGEST_PAUSE)


class _Server:
    """State of one server, shared by all requests to it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.last_answer = float("-inf")
        self._away_since: float | None = None
        self._next_report = FIRST_REPORT

    def answered(self) -> None:
        self.last_answer = time.monotonic()
        if self._next_report > FIRST_REPORT and self._away_since is not None:
            logger.warning(
                "reward server %s replies again after %.0f s",
                self.url,
                self.last_answer - self._away_since,
            )
        self._away_since = None
        self._next_report = FIRST_REPORT

    def failed(self, error: Exception, waited: float, patience: float) -> None:
        """Log an outage from time to time. Raises ``RuntimeError`` if a request has waited longer
        than ``patience``.
        """
        now = time.monotonic()
        self._away_since = now if self._away_since is None else self._away_since
        if waited > patience:
            raise RuntimeError(
                f"reward server {self.url} has failed for {waited:.0f} s (limit: {patience:g} s; "
                "for a server that has replied before, the limit is --phase-timeout); the last "
                f"error: {error}"
            ) from error
        if now - self._away_since >= self._next_report:
            self._next_report *= 2
            away = now - self._away_since
            logger.warning(
                "waiting for the reward server %s, which has failed for %.0f s: %s",
                self.url,
                away,
                error,
            )


_servers: dict[str, _Server] = {}


REMOTE_RM = Reward(remote_rm_reward, reads_reasoning=True, own_answer=None)
