"""The HTTP client of a run, with one connection pool per event loop and with retries."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import http.client
import json
import logging
import random
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from slime import registry
from slime.config.engine import EngineConfig
from slime.engines import local
from slime.engines.keys import auth_headers

if TYPE_CHECKING:
    import aiohttp

    from slime.config.args import Args

logger = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 5.0
CONNECT_SECONDS = 30.0
ASKS_FOR_RETRY = (408, 429)  # the statuses of a router whose queue is full
LONGEST_RETRY_AFTER_SECONDS = 60.0
RETRIES = 60  # about five minutes
# with --use-fault-tolerance, about as long as the restart of an engine may take
PATIENT_RETRIES = 360
BAD_ANSWERS = 5  # that a request may get; another engine may answer the next attempt
_request_seconds = float(EngineConfig.sglang_router_request_timeout_secs)
_retries = RETRIES
_on_fault: Callable[[], None] | None = None
_retried = 0  # retries since the last take_retries()
_jitter = random.Random()  # not the global generator, which users may seed
_sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = (
    weakref.WeakKeyDictionary()
)


class HttpError(RuntimeError):
    """A server answered with an error status, or did not answer.

    Attributes:
        status: The HTTP status; None if there was no response.
        retry_after: Seconds after which the server asks for a retry, from its ``Retry-After``
            header.
        disconnected: Whether the server closed the connection before the first byte of a response,
            as it does with an idle connection of the pool.
    """

    def __init__(
        self,
        message: str,
        status: int | None = None,
        retry_after: float | None = None,
        disconnected: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.disconnected = disconnected

    @property
    def retryable(self) -> bool:
        """Whether a retry may help: after connection loss, 5xx, 408 and 429. Any other 4xx is the
        caller's mistake.
        """
        return self.status is None or self.status >= 500 or self.status in ASKS_FOR_RETRY

    @property
    def is_fault(self) -> bool:
        """Whether the likely cause is the server, and not the request or the load."""
        return self.status is None or self.status >= 500


class BadAnswer(HttpError):
    """A server answered with status 200, but with something that cannot be an answer. The message
    says what is wrong.

    The request has failed and is retried, but only until it has had :data:`BAD_ANSWERS`.
    """


def watch_faults(callback: Callable[[], None]) -> None:
    """Call ``callback`` for each connection loss or 5xx status of a request of this process that
    uses retries.

    The callback runs on the event loop of the request, so it must not block.
    """
    global _on_fault
    _on_fault = callback


def init_http_client(args: Args) -> None:
    """Set the deadline and the number of retries of requests. A run calls this once, before its
    first request.
    """
    global _request_seconds, _retries, _retried
    _retried = 0  # those of an earlier run in this process are not this run's
    _retries = PATIENT_RETRIES if args.use_fault_tolerance else RETRIES
    _request_seconds = float(args.sglang_router_request_timeout_secs)
    for name in registry.parts("client"):
        registry.find("client", name)()


def request_seconds() -> float:
    """Return the time limit of a request of this process
    (``--sglang-router-request-timeout-secs``).
    """
    return _request_seconds


def session() -> aiohttp.ClientSession:
    """Return the pool of the running event loop. It has no limit on connections: callers limit
    their concurrency.
    """
    import aiohttp

    from slime.engines.sources import SpreadConnector

    loop = asyncio.get_running_loop()
    pool = _sessions.get(loop)
    if pool is None or pool.closed:
        connector = SpreadConnector(keepalive_seconds=60.0)
        # request() sets the time limit of a request as a whole; aiohttp's own total would be 5
        # minutes for all.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        pool = _sessions[loop] = aiohttp.ClientSession(
            connector=connector, timeout=timeout, trust_env=False
        )
        # such a loop runs until the process ends, and nobody closes its pool
        if threading.current_thread().daemon:
            atexit.register(_close_at_exit, loop)
    return pool


def _close_at_exit(loop: asyncio.AbstractEventLoop) -> None:
    """Close the pool of a background loop; its daemon thread still runs when atexit hooks are
    called.
    """
    if not loop.is_running():
        return

    async def end() -> None:
        # First cancel the requests, because a retry after close_session() would open a new pool.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=1.0)
        await close_session()

    with contextlib.suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(end(), loop).result(timeout=2.0)


async def close_session() -> None:
    """Close the pool of the running loop; the next request opens a new one."""
    pool = _sessions.pop(asyncio.get_running_loop(), None)
    if pool is not None:
        await pool.close()


def take_retries() -> int:
    """Return the number of retries of this process since the last call."""
    global _retried
    count = _retried
    _retried = 0
    return count


def add_retries(count: int) -> None:
    """Count retries that another process of the rollout has reported."""
    global _retried
    _retried += count


async def post(
    url: str,
    payload: object,
    max_retries: int | None = None,
    headers: dict[str, str] | None = None,
    form: type | None = None,
) -> Any:
    """POST JSON and return the decoded response: JSON if possible, otherwise text. With ``form``,
    another type fails.

    After connection loss, 5xx, 408 and 429 the request is sent again, up to ``max_retries`` times
    (default:
    :data:`RETRIES`, with ``--use-fault-tolerance`` :data:`PATIENT_RETRIES`). The delays are 0.1 s,
    0.2 s, … up to 5 s, or longer if the server asks for it (``Retry-After``). They have jitter, so
    that many clients do not retry at the same moment. Any other 4xx is the caller's mistake and
    raises immediately.

    Raises:
        HttpError: The last error, with the message of the server; or all attempts together took
            longer than ``--sglang-router-request-timeout-secs``.
    """
    return await _within_limit("POST", url, payload, max_retries, headers, form)


async def get(
    url: str, max_retries: int | None = None, headers: dict[str, str] | None = None
) -> Any:
    """GET and return the decoded response, with the same retries as :func:`post`."""
    return await _within_limit("GET", url, None, max_retries, headers)


async def _within_limit(
    method: str,
    url: str,
    payload: object,
    max_retries: int | None,
    headers: dict[str, str] | None,
    form: type | None = None,
) -> Any:
    try:
        async with asyncio.timeout(request_seconds()):
            call = lambda: request(method, url, payload, request_seconds(), headers, form)  # noqa: E731
            return await retrying(call, max_retries)
    except TimeoutError as error:
        limit = f"{request_seconds():g} s (--sglang-router-request-timeout-secs)"
        raise HttpError(f"{method} {url}: no response within {limit}") from error


async def retrying(
    call: Callable[[], Awaitable[T]],
    max_retries: int | None = None,
    give_up: Callable[[], bool] = lambda: False,
) -> T:
    """Await ``call``, and retry it after an :class:`HttpError` that is retryable; see :func:`post`.

    Args:
        give_up: Called before each delay. If it returns True, the error propagates.
    """
    global _retried
    limit = _retries if max_retries is None else max_retries
    bad = 0
    for attempt in range(limit + 1):
        try:
            return await call()
        except HttpError as error:
            if error.is_fault and _on_fault is not None:
                _on_fault()
            bad += isinstance(error, BadAnswer)
            if not error.retryable or attempt == limit or bad == BAD_ANSWERS or give_up():
                raise
            delay = min(FIRST_DELAY_SECONDS * 2 ** min(attempt, 10), LONGEST_DELAY_SECONDS)
            delay = max(
                delay * _jitter.uniform(0.75, 1.25),
                (error.retry_after or 0.0) * _jitter.uniform(1.0, 1.25),
            )
            # Warn at attempts 4, 8, 16, … only, so that a long outage is reported without flooding
            # the log.
            log = logger.warning if attempt >= 3 and attempt & (attempt + 1) == 0 else logger.debug
            log("retry %d of %d in %.1f s after: %s", attempt + 1, limit, delay, error)
            _retried += 1
            await asyncio.sleep(delay)
    raise AssertionError("unreachable")


async def request(
    method: str,
    url: str,
    payload: object,
    timeout: float,
    headers: dict[str, str] | None = None,
    form: type | None = None,
) -> Any:
    """Send one request without retries.

    Args:
        payload: Sent as JSON. Bytes are sent as they are, so they must be JSON.
        form: The type that the decoded response must have, ``dict`` or ``list``; None: any, also
            text.

    Raises:
        HttpError: The status was 400 or above, the connection was lost, or no response came within
            ``timeout`` seconds.
        BadAnswer: The response has another form, such as the HTML page of a proxy.
    """
    import aiohttp
    import orjson

    # Encode once: callers that send one body to many engines pass bytes.
    body = payload if payload is None or isinstance(payload, bytes) else orjson.dumps(payload)
    sent = {
        **({"Content-Type": "application/json"} if body is not None else {}),
        **auth_headers(url),
        **(headers or {}),
    }
    try:
        async with (
            asyncio.timeout(timeout),
            session().request(method, url, data=body, headers=sent) as answer,
        ):
            raw = await answer.read()
            status = answer.status
            retry_after = answer.headers.get("Retry-After")
    # The message names the reason, since several of these errors have no text of their own.
    except (aiohttp.ClientError, OSError) as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
            reason = f"no answer within {timeout:.0f} s"
        # Only these mean that the server closed an idle connection before it read the request.
        gone = isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError)
        raise HttpError(f"{method} {url}: {reason}", disconnected=gone) from error
    if status >= 400:
        raise HttpError(
            f"{method} {url} answered {status}: {_error_text(raw)}", status, _seconds(retry_after)
        )
    # A proxy may answer 200 with a page of its own, which must not reach the caller as an answer.
    content = decoded(raw)
    if form is not None and not isinstance(content, form):
        wanted = "a JSON object" if form is dict else "a JSON array"
        raise BadAnswer(
            f"{method} {url} answered {status}, but not with {wanted}: {str(content)[:200]!r}"
        )
    return content


def request_blocking(
    method: str, url: str, body: object = None, timeout: float = 10.0
) -> tuple[int, bytes]:
    """Send one HTTP request without retries, from synchronous code. Proxies of the environment are
    not used.

    Args:
        body: Sent as JSON.
        timeout: Seconds without any progress.

    Returns:
        The status and the body of the response. An error status is returned as well.

    Raises:
        OSError: There was no response; :class:`TimeoutError` if there was none in time.
    """
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout)
    opened = local.connection(connection.host, connection.port)
    if opened is not None:
        opened.settimeout(timeout)
        connection.sock = opened
    try:
        sent = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **auth_headers(url)}
        connection.request(method, address.path or "/", sent, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except http.client.HTTPException as error:
        raise ConnectionError(f"{method} {url}: {error or type(error).__name__}") from error
    finally:
        connection.close()


def _seconds(retry_after: str | None) -> float | None:
    """Return a ``Retry-After`` header in seconds, limited; None if there is no header or if it is a
    date.
    """
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return None
    return min(seconds, LONGEST_RETRY_AFTER_SECONDS) if seconds >= 0.0 else None


def decoded(raw: bytes) -> Any:
    """Return what JSON holds, or the text itself if it is not JSON."""
    import orjson

    try:
        return orjson.loads(raw) if raw else None
    except orjson.JSONDecodeError:
        return raw.decode(errors="replace")


def _error_text(raw: bytes) -> str:
    """Return the message of an error response, in any of the forms that SGLang, its router and
    slime use.
    """
    content = decoded(raw)
    for key in ("error", "message", "detail"):
        if isinstance(content, dict) and content.get(key):
            content = content[key]
    return str(content)[:2000]
