"""A check that all HTTP servers of slime apply to a request before they read its body.

The servers have no users other than the programs of a run, none of which is a web browser. A page
in a browser on the same machine can nevertheless send requests to a loopback port, either across
origins or by DNS rebinding.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import socket
import traceback

from aiohttp import web
from aiohttp.log import server_logger
from aiohttp.typedefs import Handler, Middleware

from slime.config.settings import HIDDEN, redacted_text
from slime.engines.keys import NO_KEYS, ServerKeys

_SESSION = re.compile(r"(?<=/s/)[^/\s'\"]+")


def _without_keys(record: logging.LogRecord) -> bool:
    """Hide keys in what aiohttp logs of a malformed request: it quotes the request line and the
    headers.
    """
    text = record.getMessage()
    if record.exc_info and record.exc_info[0] is not None:
        text += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
    record.msg = _SESSION.sub(HIDDEN, redacted_text(text))
    record.args = ()
    record.exc_info = None
    return True


server_logger.addFilter(_without_keys)
# values of Sec-Fetch-Site in requests of a web page
_FROM_A_PAGE = ("cross-site", "same-site", "same-origin")


def request_guard(*names: str, keys: ServerKeys = NO_KEYS) -> Middleware:
    """Return a middleware that refuses a request, before its body is read, if the request

    - comes from a web page (403): it has an ``Origin`` header, or a ``Sec-Fetch-Site`` header of a
      page's request;
    - was sent to another host name (403): ``Host`` is neither an IP address, nor ``localhost``, nor
      this machine's name, nor one of ``names``. DNS rebinding always uses a host name, so IP
      addresses are safe;
    - lacks the key of the server in its ``Authorization`` header (401);
    - has a compressed body (415), which can be a thousand times larger after decompression;
    - has a body that is not declared as ``application/json`` (415). A web page can send such a body
      without a preflight request.

    Servers should also be started with ``auto_decompress=False``.
    """
    own = {"localhost", *(name.lower() for name in (*names, socket.gethostname()))}

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = _refusal(request, own, keys)
        if refusal is None:
            return await handler(request)
        status, message = refusal
        body = {"error": {"message": message}, "success": False, "message": message}
        answer = web.Response(text=json.dumps(body), status=status, content_type="application/json")
        # otherwise the server would have to read the rest of the body, which may be long
        answer.force_close()
        return answer

    return guard


def _refusal(request: web.Request, own: set[str], keys: ServerKeys) -> tuple[int, str] | None:
    headers = request.headers
    if "Origin" in headers or headers.get("Sec-Fetch-Site") in _FROM_A_PAGE:
        return 403, (
            "requests from web pages are refused (the request has an Origin or Sec-Fetch-Site "
            "header)"
        )
    host = headers.get("Host", "")
    if not names_this_server(host, own):
        return 403, (
            f"the Host header names {host!r}, which is not this server; use its IP address or "
            "localhost"
        )
    if not keys.admits(request.path, headers.get("Authorization", "")):
        return 401, "the request needs the key of this run in its header 'Authorization: Bearer …'"
    if headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        return 415, "compressed bodies (Content-Encoding) are refused; send the body as it is"
    if request.body_exists and request.content_type != "application/json":
        return 415, (
            "the body must be sent with Content-Type: application/json, not "
            f"{request.content_type!r}"
        )
    return None


def names_this_server(host: str, own: set[str]) -> bool:
    """Return whether a Host header (``name``, ``name:port`` or ``[IPv6]:port``) names this
    server.
    """
    parts = re.fullmatch(r"(?:\[([^\]]*)\]|([^\[\]]*?))(?::[0-9]+)?", host)
    if parts is None:
        return False
    name = parts[1] or parts[2] or ""
    if name.lower().rstrip(".") in own:
        return True
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
