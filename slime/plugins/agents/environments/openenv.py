"""``openenv:URL``: an environment server of OpenEnv, which is started elsewhere and need not be
installed here.

A task is a seed of ``reset``. Its first observation is the prompt, the text of the model is the
action, and each further observation is a message of the user. An episode has a WebSocket of its own
(``/ws``), and with it an environment of its own in the server; what is needed before an episode
comes over HTTP (``/schema``, ``/reset``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import aiohttp

from slime.types import JsonValue

from . import (
    Environment,
    EnvironmentProblem,
    Episode,
    SeededTasks,
    Step,
    StepFailed,
    StepLimits,
)

_HTTP_SECONDS = 30.0
_FULL_SECONDS = 0.2  # between two attempts to get a session of a server that has no free one
_MESSAGE_BYTES = 100 << 20  # as in OpenEnv's own client


def make(
    what: str,
    /,
    tasks: int = 1000,
    seed: int = 0,
    system: str = "",
    tag: str = "",
    action: str = "",
    show: str = "",
) -> Environment:
    """Create the environment.

    Args:
        what: URL of the server, such as ``http://127.0.0.1:8000``.
        tasks: Number of different seeds of ``reset``, which is the number of prompts of an epoch.
        seed: From which these seeds are derived.
        system: System prompt.
        tag: The action is the text between ``<tag>`` and ``</tag>``, the last ones of a turn; a
            turn without them is the action as a whole. Default: The whole turn.
        action: The field of the action that gets the text; ``json``: the text is a JSON object with
            all fields. Default: The only field.
        show: The field of the observation that the model sees. Default: The only text, or else all
            fields as JSON.

    Raises:
        EnvironmentProblem: No such server answers, or its action has several fields and none is
            named.
    """
    if not what.startswith(("http://", "https://")):
        raise EnvironmentProblem(f"openenv:{what}: the form is openenv:http://HOST:PORT")
    url = what.rstrip("/")
    fields = sorted(http_json(url, "schema")["action"].get("properties", {}).keys() - {"metadata"})
    if action and action not in (*fields, "json"):
        raise EnvironmentProblem(
            f"action={action}: the action of {url} has {', '.join(fields)}, or json for all"
        )
    if not action and len(fields) != 1:
        raise EnvironmentProblem(
            f"the action of {url} has the fields {', '.join(fields)}: name the one that gets the "
            "text of the model (action=...), or let the model write all as JSON (action=json)"
        )
    made = OpenEnv(url, action or fields[0], show, tasks, seed, system, tag)
    made.task(0)
    return made


class OpenEnv(SeededTasks):
    """An environment server. Arguments as in :func:`make`."""

    def __init__(
        self, url: str, action: str, show: str, tasks: int, seed: int, system: str, tag: str
    ) -> None:
        super().__init__("openenv", tasks, seed, system, tag)
        self.url = url
        self.field = action
        self.show = show
        # the first observation of each task, as far as it was shown
        self._first: dict[int, str] = {}

    def first(self, number: int) -> str:
        if number not in self._first:
            data = http_json(self.url, "reset", {"seed": self.reset_seed(number)})
            self._first[number] = self.text(data["observation"])
        return self._first[number]

    def reset_seed(self, number: int) -> int:
        return super().reset_seed(number) % 2**31

    def text(self, observation: dict[str, JsonValue]) -> str:
        """What the model sees of an observation."""
        if self.show:
            if self.show not in observation:
                raise EnvironmentProblem(
                    f"show={self.show}: an observation of {self.url} has {', '.join(observation)}"
                )
            value = observation[self.show]
            return value if isinstance(value, str) else json.dumps(value)
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(observation)

    async def start(self, number: int, limits: StepLimits) -> Episode:
        while True:
            episode = OpenEnvEpisode(self, limits)
            try:
                await episode.connect()
                data = await episode.ask("reset", {"seed": self.reset_seed(number)})
            except BaseException as error:
                await episode.close()
                if not (isinstance(error, _Refused) and error.code == "CAPACITY_REACHED"):
                    raise
                await asyncio.sleep(_FULL_SECONDS)  # until the deadline of the caller
                continue
            if self.text(data["observation"]) != self._first.get(
                number, self.text(data["observation"])
            ):
                await episode.close()
                raise StepFailed(
                    "error",
                    f"reset of {self.url} does not give the same observation for the same seed",
                )
            return episode


class _Refused(RuntimeError):
    """The server answered with an error."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.code = str(data.get("code"))
        details = [
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in data.get("errors", [])
        ]
        super().__init__("; ".join(details) or str(data.get("message")))


class OpenEnvEpisode(Episode):
    """One WebSocket."""

    def __init__(self, made: OpenEnv, limits: StepLimits) -> None:
        self.made = made
        self.limits = limits
        self._session = aiohttp.ClientSession()
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def connect(self) -> None:
        self._socket = await self._session.ws_connect(
            f"{self.made.url}/ws", max_msg_size=_MESSAGE_BYTES
        )

    async def ask(self, kind: str, data: dict[str, JsonValue]) -> dict[str, Any]:
        """Send a message and return the data of the answer.

        Raises:
            _Refused: The answer is an error.
        """
        assert self._socket is not None, "an episode connects before it asks"
        await self._socket.send_json({"type": kind, "data": data})
        answer = await self._socket.receive_json()
        if answer["type"] == "error":
            raise _Refused(answer["data"])
        result: dict[str, Any] = answer["data"]
        return result

    async def step(self, text: str) -> Step:
        turn = self.made.action(text)
        try:
            action: Any = json.loads(turn) if self.made.field == "json" else {self.made.field: turn}
        except (ValueError, RecursionError):
            action = None
        if not isinstance(action, dict):
            return Step([{"role": "user", "content": "error: this is not a JSON object"}])
        try:
            async with asyncio.timeout(self.limits.seconds):
                data = await self.ask("step", action)
        except _Refused as error:
            if error.code != "VALIDATION_ERROR":
                raise
            return Step([{"role": "user", "content": f"error: {error}"}])
        reward = float(data.get("reward") or 0.0)
        if data.get("done"):
            return Step(reward=reward, done=True)
        return Step([{"role": "user", "content": self.made.text(data["observation"])}], reward)

    async def close(self) -> None:
        if self._socket is not None and not self._socket.closed:
            with contextlib.suppress(OSError):
                await self._socket.send_json({"type": "close"})
                await self._socket.close()
        await self._session.close()


def http_json(
    url: str, path: str, body: dict[str, JsonValue] | None = None, server: str = "OpenEnv"
) -> dict[str, Any]:
    """GET, or POST of a body, without a proxy, from a server of this kind.

    Raises:
        EnvironmentProblem: There is no such answer.
    """
    request = Request(f"{url}/{path}", headers={"Content-Type": "application/json"})
    if body is not None:
        request.data = json.dumps(body).encode()
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=_HTTP_SECONDS) as answer:
            content: dict[str, Any] = json.load(answer)
            return content
    except (OSError, ValueError) as error:  # URLError is an OSError
        raise EnvironmentProblem(
            f"no {server} server answers at {url}/{path} ({error}): start it first, or correct the "
            "URL"
        ) from error
