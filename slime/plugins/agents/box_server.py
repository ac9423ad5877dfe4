"""Sandboxes over HTTP: a server that lends the namespace sandbox of its machine, and its client.

    SLIME_SANDBOX_KEY=... python -m slime.plugins.agents.box_server --port 8177

``POST /boxes`` creates a box, ``POST /boxes/ID`` runs a command in it, ``DELETE /boxes/ID`` gives it
back. Every request has the key (``Authorization: Bearer KEY``). Commands come from a model and are
isolated, as :mod:`slime.plugins.agents.sandbox` describes; who has the key can use the machine's
time and memory within the limits.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import aiohttp
from aiohttp import web

from slime.engines.keys import ServerKeys
from slime.plugins.http.server import MISTAKES, Refused, body_of, errors_as_json, json_answer

from .box import LIMITS, Box, BoxProblem, LocalBox, Ran
from .sandbox import Limits, Result, SandboxUnavailable

KEY = "SLIME_SANDBOX_KEY"
"""Name of the environment variable with the key, for server and client."""
BODY_BYTES = 512 << 20
"""Largest body of a request and of an answer."""
_MOST_SECONDS = 3600.0  # of one command
_LARGEST = replace(LIMITS, seconds=_MOST_SECONDS)
"""Limits that no box exceeds."""
_IDLE_SECONDS = 3600.0  # after which a box that its client forgot is dropped
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class _Lent:
    """A box, the lock that runs one command of it at a time, and when it was last used."""

    box: Box
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    used: float = field(default_factory=time.monotonic)


class BoxServer:
    """The server's boxes.

    Args:
        key: Which clients send.
        most: Number of boxes at a time.
    """

    def __init__(self, key: str, most: int = 64) -> None:
        self._keys = ServerKeys(key)
        self._most = most
        self._boxes: dict[str, _Lent] = {}
        middlewares = [errors_as_json(lambda message: {"error": message}, MISTAKES), self._guarded]
        self.app = web.Application(client_max_size=BODY_BYTES, middlewares=middlewares)
        self.app.router.add_post("/boxes", self.create)
        self.app.router.add_post("/boxes/{id}", self.run)
        self.app.router.add_delete("/boxes/{id}", self.close)

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests without the key."""
        if not self._keys.admits(request.path, request.headers.get("Authorization", "")):
            raise Refused(f"the key is not that of the server ({KEY})", 401)
        try:
            return await handler(request)
        except SandboxUnavailable as error:
            raise Refused(str(error), 503) from error

    async def create(self, request: web.Request) -> web.Response:
        """``{"limits": {...}, "folders": [...], "scratch": [...]}`` -> ``{"id": ...}``."""
        body = await body_of(request)
        now = time.monotonic()
        for name, lent in list(self._boxes.items()):
            if now - lent.used > _IDLE_SECONDS and not lent.lock.locked():
                del self._boxes[name]
        if len(self._boxes) >= self._most:
            raise Refused(f"all {self._most} boxes are lent", 429)
        asked = body["limits"]
        limits = Limits(
            **{
                name: min(type(most)(asked.get(name, most)), most)
                for name, most in asdict(_LARGEST).items()
            }
        )
        paths = [[_absolute(path) for path in body[name]] for name in ("folders", "scratch")]
        name = uuid.uuid4().hex
        self._boxes[name] = _Lent(LocalBox(limits, *paths))
        return json_answer({"id": name})

    async def run(self, request: web.Request) -> web.Response:
        """The arguments of :meth:`Box.run`, with files in base64 -> its result."""
        lent = self._boxes.get(request.match_info["id"])
        if lent is None:
            raise Refused("there is no such box: it was given back, or not used for long", 404)
        body = await body_of(request)
        put = {_absolute(path): base64.b64decode(text) for path, text in body["put"].items()}
        get = [_absolute(path) for path in body["get"]]
        environment = {str(name): str(value) for name, value in body["environment"].items()}
        async with lent.lock:
            ran = await lent.box.run(
                str(body["command"]), float(body["seconds"]), put, get, environment
            )
        lent.used = time.monotonic()
        return json_answer({"result": asdict(ran.result), "files": _as_text(ran.files)})

    async def close(self, request: web.Request) -> web.Response:
        """Drop a box."""
        self._boxes.pop(request.match_info["id"], None)
        return json_answer({})


def _absolute(path: object) -> str:
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        raise ValueError(f"{path!r} is no absolute path")
    return path


def _as_text(files: Mapping[str, bytes | None]) -> dict[str, str | None]:
    return {
        path: None if data is None else base64.b64encode(data).decode()
        for path, data in files.items()
    }


class HttpBox(Box):
    """A box of a server. It is created with the first command, and closed with the last."""

    def __init__(
        self, url: str, limits: Limits, folders: Sequence[str], scratch: Sequence[str] = ()
    ) -> None:
        super().__init__(limits, folders, scratch)
        self._url = url.rstrip("/")
        self._name: str | None = None

    async def run(
        self,
        command: str,
        seconds: float,
        put: Mapping[str, bytes] | None = None,
        get: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Ran:
        if self._name is None:
            paths = {"folders": list(self.folders), "scratch": list(self.scratch)}
            made = await self._ask("POST", "/boxes", {"limits": asdict(self.limits), **paths})
            self._name = made["id"]
        body = {
            "command": command,
            "seconds": seconds,
            "put": _as_text(put or {}),
            "get": list(get),
            "environment": dict(environment or {}),
        }
        told = await self._ask("POST", f"/boxes/{self._name}", body, seconds)
        files = told["files"].items()
        return Ran(
            Result(**told["result"]),
            {path: None if text is None else base64.b64decode(text) for path, text in files},
        )

    async def close(self) -> None:
        if self._name is not None:
            await self._ask("DELETE", f"/boxes/{self._name}", {})

    async def _ask(
        self, method: str, path: str, body: dict[str, Any], seconds: float = 0.0
    ) -> dict[str, Any]:
        """Send a request; its deadline leaves time for other commands of the server."""
        key = {"Authorization": f"Bearer {os.environ.get(KEY, '')}"}
        timeout = aiohttp.ClientTimeout(total=seconds + 300.0)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=key) as http,
                http.request(method, f"{self._url}{path}", json=body) as response,
            ):
                data = b""
                async for part in response.content.iter_any():
                    data += part
                    if len(data) > BODY_BYTES:
                        raise BoxProblem(f"{self._url}{path}: the answer is too large")
                answer: dict[str, Any] = json.loads(data)
                if response.status != 200:
                    raise BoxProblem(f"{self._url}{path}: {response.status}: {answer['error']}")
                return answer
        except (OSError, TimeoutError, aiohttp.ClientError, ValueError) as error:
            raise BoxProblem(f"{self._url}{path}: {type(error).__name__}: {error}") from error


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(
        description=f"Lend sandboxes of this machine over HTTP. The key is in {KEY}."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=int, required=True, help="port to listen at")
    parser.add_argument("--boxes", type=int, default=64, help="number of sandboxes at a time")
    options = parser.parse_args()
    key = os.environ.get(KEY)
    if not key:
        parser.error(f"set {KEY} to a secret that the clients have too")
    server = BoxServer(key, options.boxes)
    web.run_app(server.app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()
