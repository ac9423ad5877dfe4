"""End what the engines still generate, and wait until its tasks are done."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from slime.data.sample import Group
from slime.rollout.generate import get_model_url
from slime.rollout.state import GenerateState

if TYPE_CHECKING:
    from slime.config.args import Args

logger = logging.getLogger(__name__)
RETRY_SECONDS = 1.0  # a multi-turn function may send another request after an abort
ANSWER_SECONDS = 10.0  # an engine that hangs must not hold up the others
_MOST_TRIES = 10
_LONGEST_REST_SECONDS = 5.0


async def worker_urls(args: Args) -> list[str]:
    """Addresses of the engines: those the router lists, or the only engine, which has no ``/workers``."""
    from slime.engines.http import HttpError, request, retrying
    from slime.engines.router import engine_url

    base = get_model_url(args, path="").rstrip("/")
    try:
        listed = await retrying(lambda: request("GET", f"{base}/workers", None, ANSWER_SECONDS), 3)
    except HttpError as error:
        if error.status in (404, 405):
            return [base]
        raise
    urls = [worker["url"] if isinstance(worker, dict) else worker for worker in listed.get("workers", [])]
    return list(dict.fromkeys(map(engine_url, urls))) or [base]


async def abort(args: Args) -> None:
    """Set the abort flag and tell every engine to end all requests; they answer with what they have.

    An engine or router that cannot be reached is only logged: its requests fail by themselves.
    """
    from slime.engines.http import HttpError, request

    GenerateState(args).aborted = True
    try:
        urls = await worker_urls(args)
    except HttpError as error:
        logger.warning("the router did not say who its engines are: %s", error)
        return
    body = {"rid": "", "abort_all": True}
    calls = (request("POST", f"{url}/abort_request", body, ANSWER_SECONDS) for url in urls)
    for url, answer in zip(urls, await asyncio.gather(*calls, return_exceptions=True), strict=True):
        if isinstance(answer, BaseException):
            logger.warning("engine %s did not take the abort: %s", url, answer)


def rest_seconds(what: str, tries: int) -> float:
    """How long to wait before something goes on that an engine ended though nobody asked.

    Args:
        tries: in a row without a new token.

    Raises:
        RuntimeError: too many.
    """
    if tries > _MOST_TRIES:
        raise RuntimeError(f"{what} was aborted by its engines {tries} times without a new token")
    return min(0.1 * 2**tries, _LONGEST_REST_SECONDS) if tries else 0.0


async def abort_and_drain(args: Args, tasks: Collection[asyncio.Task[Group]], deadline: float) -> None:
    """Abort until all ``tasks`` are done.

    Args:
        deadline: a ``time.monotonic()`` value.

    Raises:
        TimeoutError: some went on.
    """
    pending = set(tasks)
    while pending:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{len(pending)} groups went on after the engines were told to abort (--phase-timeout)")
        try:
            async with asyncio.timeout(max(left, 1.0)):
                await abort(args)
        except TimeoutError as error:
            raise TimeoutError("the engines did not take the order to abort (--phase-timeout)") from error
        _, pending = await asyncio.wait(pending, timeout=min(RETRY_SECONDS, left))
