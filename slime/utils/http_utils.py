"""Documented import path of the HTTP client; the code is in :mod:`slime.engines.http`."""

from __future__ import annotations

import socket
from typing import Any

from slime.engines import http
from slime.engines.http import HttpError, get, init_http_client
from slime.engines.keys import auth_headers
from slime.engines.launch import engine_count as get_rollout_num_engines
from slime.utils.misc import get_current_node_ip

__all__ = [
    "HttpError",
    "auth_headers",
    "get",
    "get_host_info",
    "get_rollout_num_engines",
    "init_http_client",
    "post",
]


async def post(
    url: str,
    payload: object,
    max_retries: int | None = None,
    headers: dict[str, str] | None = None,
    use_http2: bool = False,
) -> Any:
    """Call :func:`slime.engines.http.post`. ``use_http2`` has no effect: requests are sent by
    HTTP/1.1.
    """
    return await http.post(url, payload, max_retries, headers)


def get_host_info() -> tuple[str, str]:
    """Return the name of this machine and its address in the cluster."""
    return socket.gethostname(), get_current_node_ip()
