"""Abort all requests on the engines, and wait until the tasks that sent them are done."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from slime.data.sample import Group
from slime.engines.http import HttpError, request
from slime.rollout.generate import get_model_url
from slime.rollout.state import GenerateState

logger = logging.getLogger(__name__)
# the abort is repeated, because a multi-turn function may send another request after it
RETRY_SECONDS = 1.0
ANSWER_SECONDS = 10.0  # short, so that an engine that hangs does not delay the others
_MOST_TRIES = 10
_LONGEST_DELAY_SECONDS = 5.0


async def abort(state: GenerateState) -> None:
    """Set the abort flag and tell every engine to abort all requests; they reply with the tokens so
    far.

    An engine or router that cannot be reached is only logged, because its requests fail without an
    abort.
    """
    from slime.engines.handle import worker_urls

    state.aborted = True  # first: tasks that continue after the abort must not send new requests
    if state.generator is not None:
        await state.generator.abort()
    try:
        urls = await worker_urls(get_model_url(state.args, path=""))
    except HttpError as error:
        logger.warning(
            "the router did not list its engines, so their requests are not aborted: %s", error
        )
        return
    body = {"rid": "", "abort_all": True}
    calls = (request("POST", f"{url}/abort_request", body, ANSWER_SECONDS) for url in urls)
    for url, answer in zip(urls, await asyncio.gather(*calls, return_exceptions=True), strict=True):
        if isinstance(answer, BaseException):
            logger.warning("engine %s did not accept the abort: %s", url, answer)


def retry_delay(what: str, tries: int) -> float:
    """Return the seconds to wait before sending a request again that an engine ended without an
    abort of this process.

    Args:
        what: What was ended, for the error message.
        tries: Number of attempts in a row that brought no new token.

    Raises:
        RuntimeError: There were more than 10 such attempts in a row.
    """
    if tries > _MOST_TRIES:
        raise RuntimeError(
            f"{what} was aborted by its engines {tries} times in a row without a new token"
        )
    return min(0.1 * 2**tries, _LONGEST_DELAY_SECONDS) if tries else 0.0


async def abort_and_drain(
    state: GenerateState, tasks: Collection[asyncio.Task[Group]], deadline: float
) -> None:
    """Abort repeatedly until all ``tasks`` are done.

    Args:
        deadline: A ``time.monotonic()`` value.

    Raises:
        TimeoutError: Some tasks were not done at the deadline.
    """
    pending = set(tasks)
    while pending:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(
                f"{len(pending)} groups did not end after the abort of all requests "
                "(--phase-timeout)"
            )
        try:
            async with asyncio.timeout(max(left, 1.0)):
                await abort(state)
        except TimeoutError as error:
            raise TimeoutError(
                "the engines did not accept the abort within the deadline (--phase-timeout)"
            ) from error
        _, pending = await asyncio.wait(pending, timeout=min(RETRY_SECONDS, left))
