"""The server of the page.

It only reads, and it answers no request that another web page can make. It listens on the
loopback address. If it is opened to other machines, each request needs the token that the address
in the terminal has; the browser keeps it in a cookie.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import logging
import secrets
import socket
from dataclasses import dataclass

import xxhash
from aiohttp import web
from aiohttp.typedefs import Handler

from slime.plugins.http.server import names_this_server

from . import NotFound, answer, as_json, assets, served
from .runs import Runs

logger = logging.getLogger(__name__)
PORT = 8321
_FOREIGN = ("cross-site", "same-site")  # values of Sec-Fetch-Site in requests of another page
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class PortTaken(OSError):
    """The port of ``--port`` is used by another program."""


@dataclass(frozen=True)
class Door:
    """Where the server listens, and who may enter.

    Attributes:
        token: What each request must have; None if none is needed.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    token: str | None = None

    @classmethod
    def at(cls, host: str, port: int, always: bool = False) -> Door:
        """Return the door for ``--host`` and ``--port``, with a new token if the address is not a
        loopback one.

        Args:
            always: A loopback address gets a token as well, since other users of the machine can
                reach it.
        """
        return cls(
            host, port, secrets.token_urlsafe(24) if always or not is_loopback(host) else None
        )

    @property
    def cookie(self) -> str:
        """The name of the cookie; cookies do not distinguish ports."""
        return f"slime_ui_{self.port}"

    @property
    def address(self) -> str:
        """The address to open, with the token."""
        name = (
            self.host
            if is_loopback(self.host)
            else socket.gethostname()
            if _is_any(self.host)
            else self.host
        )
        name = f"[{name}]" if ":" in name else name
        return f"http://{name}:{self.port}/" + (f"?token={self.token}" if self.token else "")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_any(host: str) -> bool:
    return host in ("", "0.0.0.0", "::")


def make_app(runs: Runs, door: Door) -> web.Application:
    """Build the application: the page, its files, and the JSON under ``/api``."""
    app = web.Application(middlewares=[_guard(door)])
    html, policy = served()

    async def index(request: web.Request) -> web.Response:
        if "token" in request.query:  # the guard has checked it; it does not stay in the address
            response = web.Response(status=303, headers={"Location": "/"})
            assert door.token is not None
            response.set_cookie(door.cookie, door.token, httponly=True, samesite="Lax", path="/")
            return response
        return web.Response(
            text=html, content_type="text/html", headers={"Content-Security-Policy": policy}
        )

    # The files are known beforehand, so that no address names a file of the machine.
    async def static(request: web.Request) -> web.Response:
        asset = assets().get(request.match_info["name"])
        if asset is None:
            raise web.HTTPNotFound
        return web.Response(
            body=asset[1],
            content_type=asset[0],
            charset="utf-8",
            headers={"Cache-Control": "no-cache"},
        )

    # A view reads files and may take a while; meanwhile other requests are answered.
    async def api(request: web.Request) -> web.Response:
        try:
            value = await asyncio.to_thread(answer, runs, request.rel_url.raw_path)
            status = 200
        except NotFound as error:
            value = {"error": str(error)}
            status = 404
        except Exception as error:
            logger.exception("%s failed", request.path)
            value = {"error": f"{type(error).__name__}: {error}"}
            status = 500
        return _json(request, value, status)

    app.add_routes(
        [web.get("/", index), web.get("/static/{name}", static), web.get("/api/{path:.*}", api)]
    )
    return app


def _json(request: web.Request, value: object, status: int) -> web.Response:
    """Return a value as JSON; 304 without a body if the browser has it already."""
    # The page asks again every few seconds, and mostly nothing has changed.
    body = as_json(value)
    tag = f'"{xxhash.xxh64_hexdigest(body)}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if status == 200 and request.headers.get("If-None-Match") == tag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _guard(door: Door) -> web.middleware:  # type: ignore[valid-type]
    # A page of a foreign name that resolves to this address is refused by the Host that it sends.
    own = {"localhost", socket.gethostname().lower(), door.host.lower()}
    if not is_loopback(door.host):
        own.add(socket.getfqdn().lower())

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = _refusal(request, door, own)
        if refusal is not None:
            response: web.StreamResponse = web.Response(status=refusal[0], text=refusal[1] + "\n")
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = web.Response(status=error.status, text=f"{error.reason}\n")
        response.headers.update(_HEADERS)
        return response

    return guard


def _refusal(request: web.Request, door: Door, own: set[str]) -> tuple[int, str] | None:
    host = request.headers.get("Host", "")
    if not names_this_server(host, own):
        return 403, f"the Host header names {host!r}, which is not this server"
    # A link to the page may come from elsewhere; only the page itself may ask for what it shows.
    site = request.headers.get("Sec-Fetch-Site")
    origin = request.headers.get("Origin", f"http://{host}")
    foreign = site in _FOREIGN if site is not None else origin != f"http://{host}"
    if foreign and request.path != "/":
        return 403, "requests from other web pages are refused"
    # Nothing can be changed, so that no other method has a meaning.
    if request.method not in ("GET", "HEAD"):
        return 405, "this server only reads"
    if door.token is not None:
        given = request.query.get("token", "") if request.path == "/" else ""
        if not _same(given or request.cookies.get(door.cookie, ""), door.token):
            return 401, "open the address that slime ui printed, with its token"
    elif "token" in request.query:
        return 404, "this server needs no token"
    return None


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def bind(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens on ``host``.

    Args:
        port: None takes :data:`PORT`, or a free one if another program has it.

    Raises:
        PortTaken: The port was given and is not free.
        OSError: The address is not one of this machine.
    """
    # The default port is a convenience; one that the user names is a wish.
    try:
        return _listening(host, PORT if port is None else port)
    except PortTaken:
        if port is not None:
            raise
        return _listening(host, 0)


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"port {port} of {host} is used by another program; give another --port"
            ) from error
        raise


async def serve(runs: Runs, door: Door, listener: socket.socket, stop: asyncio.Event) -> None:
    """Answer requests until ``stop`` is set."""
    runner = web.AppRunner(make_app(runs, door), access_log=None, shutdown_timeout=2)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        await stop.wait()
    finally:
        await runner.cleanup()
