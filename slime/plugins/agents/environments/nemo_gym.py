"""``nemo_gym:URL?data=FILE.jsonl``: a resources server of NeMo-Gym, which is started elsewhere and
need not be installed here.

A task is a row of the data file. The model answers at the session's Responses endpoint, its calls
go to the server, and the server scores the episode. There are two kinds of servers, which the paths
of ``/openapi.json`` tell apart. Most have a path for each tool, and score the whole episode::

    POST /seed_session   the row
    POST /TOOL           the arguments of a call           -> what the model sees
    POST /verify         the row and the response          -> {"reward": ...}

Those like Gymnasium answer every response of the model::

    POST /reset          the row                           -> {"observation": ...}
    POST /step           the row and the response          -> {"observation", "reward",
                                                               "terminated", "truncated", "info"}

A cookie names the episode. Source: the package nemo-gym 0.4.0 (``base_resources_server.py``, and
``simple_agent`` and ``gymnasium_agent`` of ``responses_api_agents``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from slime.data.sample import Message
from slime.types import JsonValue

from ..messages import text_of
from . import EnvironmentProblem, Task
from .openenv import http_json
from .played import Played, ask

if TYPE_CHECKING:
    from ..program import Task as Program

Json = dict[str, Any]
_PARAMS = "responses_create_params"
_OWN = ("seed_session", "verify", "aggregate_metrics", "reset", "step", "mcp")
"""Paths of a server that are no tools."""


def make(what: str, /, data: str, seed: int | None = None, tasks: int = 0) -> Played:
    """Create the environment.

    Args:
        what: URL of a resources server, such as ``http://127.0.0.1:8001``.
        data: JSONL file with the rows of the server's data set.
        seed: Not used: the tasks are the rows.
        tasks: Use only this many rows, from the first. 0: all of them.

    Raises:
        EnvironmentProblem: No such server answers, or a row is not one of NeMo-Gym's.
    """
    if not what.startswith(("http://", "https://")):
        raise EnvironmentProblem(
            f"nemo_gym:{what}: the form is nemo_gym:http://HOST:PORT?data=FILE"
        )
    url = what.rstrip("/")
    paths = {path.strip("/") for path in http_json(url, "openapi.json", server="NeMo-Gym")["paths"]}
    if not {"reset", "step"} <= paths and "verify" not in paths:
        raise EnvironmentProblem(
            f"{url} has neither /verify nor /reset and /step: give the URL of a resources server, "
            "not that of an agent or of the head server"
        )
    with Path(data).open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    for number, row in enumerate(rows[: tasks or None], start=1):
        if not isinstance(row.get(_PARAMS), dict) or "input" not in row[_PARAMS]:
            raise EnvironmentProblem(f"{data}, row {number}: it has no {_PARAMS} with an input")
    return NemoGym(url, rows[: tasks or None], paths)


@dataclass(eq=False)
class NemoGym(Played):
    """The rows of one data set, and their server.

    Args:
        paths: Of the server, without slashes.
    """

    url: str
    tasks: Sequence[Json]
    paths: set[str]

    def task(self, number: int) -> Task:
        params = self.tasks[number][_PARAMS]
        messages: list[Message] = [
            {"role": item["role"], "content": text_of(item["content"])}
            for item in _items(params)
            if "role" in item
        ]
        if params.get("instructions"):
            messages.insert(0, {"role": "system", "content": params["instructions"]})
        return Task(messages)

    async def play(self, number: int, program: Program) -> float:
        row = self.tasks[number]
        # The session's own deadline is the one that counts; hosts may be addresses.
        without = aiohttp.ClientTimeout()
        cookies = aiohttp.CookieJar(unsafe=True)
        async with (
            aiohttp.ClientSession(timeout=without) as model,
            aiohttp.ClientSession(timeout=without, cookie_jar=cookies) as server,
        ):
            episode = _Episode(self.url, row, program, model, server)
            if "step" in self.paths:
                return await episode.steps()
            return await episode.calls(self.paths.difference(_OWN))


@dataclass
class _Episode:
    """One episode: what the model and the server said so far."""

    url: str
    row: Json
    program: Program
    model: aiohttp.ClientSession
    server: aiohttp.ClientSession

    def __post_init__(self) -> None:
        self.input: list[Json] = _items(self.row[_PARAMS])
        self.output: list[Json] = []

    async def post(self, path: str, body: JsonValue, strict: bool = True) -> str:
        """Send to the server, and return the text of its answer.

        Raises:
            RuntimeError: The answer is an error, and ``strict``.
        """
        async with self.server.post(f"{self.url}/{path}", json=body) as response:
            text = await response.text()
            if strict and response.status != 200:
                raise RuntimeError(f"{self.url}/{path} answered {response.status}: {text[:1000]}")
            return text

    async def respond(self) -> Json | None:
        """Let the model continue; None if there is no room."""
        body = {
            **self.row[_PARAMS],
            "model": self.program.model,
            "input": [*self.input, *self.output],
        }
        url = f"{self.program.openai_base_url}/responses"
        answer = await ask(self.model, url, self.program.api_key, body)
        if answer is not None:
            self.output += answer["output"]
        return answer

    async def calls(self, tools: set[str]) -> float:
        """Play against a server with a path for each tool."""
        seeded = json.loads(await self.post("seed_session", self.row))
        if "mcp" in (seeded or {}):
            raise RuntimeError(f"the tools of {self.url} need MCP, which slime does not offer here")
        last: Json | None = None
        while (answer := await self.respond()) is not None:
            last = answer
            calls = [item for item in answer["output"] if item["type"] == "function_call"]
            if not calls or answer["incomplete_details"]:
                break
            for call in calls:
                result = await self._call(call, tools)
                self._answered(call["call_id"], result)
        if last is None:
            raise RuntimeError("the prompt leaves no room for an answer")
        body = {**self.row, "response": {**last, "output": self.output}}
        return float(json.loads(await self.post("verify", body))["reward"])

    async def _call(self, call: Json, tools: set[str]) -> str:
        # The name comes from the model, and must not lead to another path of the server.
        if call["name"] not in tools:
            return json.dumps({"error": f"there is no tool {call['name']}"})
        try:
            arguments = json.loads(call["arguments"])
        except (ValueError, RecursionError) as error:
            return json.dumps({"error": f"the arguments are not JSON: {error}"})
        return await self.post(call["name"], arguments, strict=False)

    def _answered(self, call_id: str, result: str) -> None:
        self.output.append({"type": "function_call_output", "call_id": call_id, "output": result})

    async def steps(self) -> float:
        """Play against a server like Gymnasium; the reward is the sum of its steps."""
        first = json.loads(await self.post("reset", self.row)).get("observation")
        if first:
            self.input.append({"role": "user", "content": first})
        total = 0.0
        while (answer := await self.respond()) is not None:
            step = json.loads(await self.post("step", {**self.row, "response": answer}))
            total += step["reward"]
            if step["terminated"] or step["truncated"]:
                break
            for one in (step.get("info") or {}).get("tool_outputs", []):
                self._answered(one["call_id"], one["output"])
            if step.get("observation"):
                self.output.append({"role": "user", "content": step["observation"]})
        return total


def _items(params: Json) -> list[Json]:
    """Return the input of a row as items."""
    given = params["input"]
    return [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
