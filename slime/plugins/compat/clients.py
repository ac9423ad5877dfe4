"""The key of the run for HTTP clients of a user's own.

Functions written for other releases post to ``http://{args.sglang_router_ip}:{…_port}`` with
aiohttp, httpx (also within the package openai) or requests, which know nothing of keys. In the
processes that run users' functions, these libraries therefore send the key of the run, to the
addresses of its servers alone: who has no part in the run has no such process. A made-up key, such
as the ``EMPTY`` that the package openai wants, is replaced.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Protocol, TypeVar

from slime.engines.keys import auth_headers

if TYPE_CHECKING:
    import aiohttp
    import yarl

T = TypeVar("T")


@functools.cache
def send_keys_too() -> None:
    """Let the HTTP libraries that are installed send the keys of :mod:`slime.engines.keys`."""
    session = importlib.import_module("aiohttp").ClientSession
    session._request = _of_aiohttp(session._request)
    for library, names in (("httpx", ("Client", "AsyncClient")), ("requests", ("Session",))):
        if importlib.util.find_spec(library) is not None:
            for name in names:
                client = getattr(importlib.import_module(library), name)
                client.send = _of_prepared(client.send)


def _of_aiohttp(send: Callable[..., T]) -> Callable[..., T]:
    """Wrap the method behind all requests of aiohttp. Where a server redirects to another one, the
    library itself takes the key off."""
    from multidict import CIMultiDict

    @functools.wraps(send)
    def request(
        client: aiohttp.ClientSession,
        method: str,
        url: str | yarl.URL,
        *,
        headers: Mapping[str, str] | None = None,
        auth: object = None,
        **options: object,
    ) -> T:
        if key := auth_headers(str(client._build_url(url))):
            auth = None
            headers = CIMultiDict(headers or {})
            headers.update(key)
        return send(client, method, url, headers=headers, auth=auth, **options)

    return request


class _Prepared(Protocol):
    """A request of httpx or requests; its headers do not tell upper from lower case."""

    url: object
    headers: MutableMapping[str, str]


def _of_prepared(send: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(send)
    def prepared(client: object, request: _Prepared, **options: object) -> T:
        request.headers.update(auth_headers(str(request.url)))
        return send(client, request, **options)

    return prepared
