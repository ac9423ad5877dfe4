"""An independent rollout server: generators write finished groups into its buffer, training takes
them out.

    python server.py [--port 8889]

It knows nothing of slime and runs wherever you start it, for example in an agent's own environment.
Each request but /health needs the key in the file of ``--key-file`` as ``Authorization: Bearer
KEY``. The server makes the file, readable by its owner only; copy it if training runs on another
machine. Requests are not encrypted.

    POST /start_rollout     {"task_type", "engine_url", "engine_headers", "groups": [{"group_index", "prompt",
                            "input_ids", "label", "metadata", "sampling_params": [of each sample]}]}: hands them to the
                            type's generator
    POST /buffer/write      {"task_type", "group_index", "samples": [...]}: one finished group, from a generator
    POST /get_rollout_data  {"task_type", "num_groups"}: takes up to so many groups out of the buffer
    GET  /health

A generator is a module in ``generators/`` with ``TASK_TYPE`` and ``async run_rollout(task)``, and,
if it likes, ``transform_group(samples) -> samples`` and ``is_valid_group(samples) -> bool``. A new
file is found by its being there.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import importlib.util
import os
import re
import secrets
import socket
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from aiohttp import web

NEEDED = (
    "tokens",
    "response",
    "response_length",
    "rollout_log_probs",
    "loss_mask",
    "reward",
    "status",
)
MAX_BODY_BYTES = 64 << 20
KEY_FILE = Path("~/.cache/slime/rollout_buffer.key")
OWN_NAMES = {"localhost", "[::1]", socket.gethostname()}
Row = dict[str, Any]
T = TypeVar("T")


@dataclass
class TaskBuffer:
    """What one generator has made."""

    generator: ModuleType
    ready: deque[Row] = field(default_factory=deque)
    # group indices that is_valid_group refused, until they are told
    rejected: list[int] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)  # handed to the generator, not written yet
    error: str | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self, task: Row) -> None:
        groups = need(task, "groups", list)
        if not all(isinstance(group, dict) for group in groups):
            raise ValueError("groups must be a list of objects")
        self.waiting.update([need(group, "group_index", int) for group in groups])
        running = asyncio.get_running_loop().create_task(self.generator.run_rollout(task))
        self.tasks.add(running)
        running.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.error = f"generator {self.generator.TASK_TYPE!r}: {type(error).__name__}: {error}"

    def write(self, group_index: int, samples: list[Row]) -> None:
        """Put a group into the buffer, transformed, if its generator finds it valid."""
        if group_index not in self.waiting:
            raise ValueError(f"group {group_index} was not asked for, or was written before")
        for sample in samples:
            check_sample(sample)
        samples = getattr(self.generator, "transform_group", lambda group: group)(samples)
        valid = getattr(self.generator, "is_valid_group", lambda group: True)(samples)
        # not before: a group that is refused can be written again
        self.waiting.discard(group_index)
        if valid:
            self.ready.append({"group_index": group_index, "samples": samples})
        else:
            self.rejected.append(group_index)

    def take(self, count: int) -> Row:
        """Groups in the order of their completion; they leave the buffer."""
        groups = [self.ready.popleft() for _ in range(min(count, len(self.ready)))]
        rejected, self.rejected = self.rejected, []
        return {
            "groups": groups,
            "rejected": rejected,
            "waiting": len(self.waiting),
            "error": self.error,
        }


def need(body: Row, name: str, kind: type[T]) -> T:
    """A field of a request.

    Raises:
        ValueError: it is missing or of another type.
    """
    value = body.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} must be of type {kind.__name__}, got {str(value)[:100]}")
    return value


def check_sample(sample: Row) -> None:
    """Training needs ids and the log-prob of each: text alone cannot be trained on exactly.

    Raises:
        ValueError: a field is missing, or lengths do not go together.
    """
    if not isinstance(sample, dict):
        raise ValueError("a sample must be an object")
    if missing := [name for name in NEEDED if sample.get(name) is None]:
        raise ValueError(f"a sample lacks {', '.join(missing)}")
    length = need(sample, "response_length", int)
    for name in ("tokens", "rollout_log_probs", "loss_mask"):
        need(sample, name, list)
    for name in ("rollout_log_probs", "loss_mask"):
        if len(sample[name]) != length:
            raise ValueError(
                f"a sample has {len(sample[name])} entries in {name}, but response_length is "
                f"{length}"
            )
    if len(sample["tokens"]) <= length:
        raise ValueError(
            f"a sample has {len(sample['tokens'])} tokens, {length} of them response: no prompt "
            "is left"
        )


def find_generators(folder: Path) -> dict[str, ModuleType]:
    """The modules of a folder by their ``TASK_TYPE``."""
    found: dict[str, ModuleType] = {}
    for file in sorted(folder.glob("[!_]*.py")):
        spec = importlib.util.spec_from_file_location(f"generator_{file.stem}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if hasattr(module, "TASK_TYPE") and hasattr(module, "run_rollout"):
            found[module.TASK_TYPE] = module
    return found


def key_in(file: Path) -> str:
    """The key in the file; a file that does not exist is made, for this user only."""
    file = file.expanduser()
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(
            os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii"
        ) as new:
            new.write(secrets.token_urlsafe(32))
    except FileExistsError:
        pass
    return file.read_text(encoding="ascii").strip()


def require_key(key: str) -> Any:
    """401 for requests without the key, except ``/health``."""

    @web.middleware
    async def check(request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if request.path != "/health" and not hmac.compare_digest(given, f"Bearer {key}".encode()):
            return web.json_response(
                {"error": "the request needs the key in the file of --key-file"}, status=401
            )
        return await handler(request)

    return check


@web.middleware
async def refuse_web_pages(request: web.Request, handler: Any) -> web.StreamResponse:
    """403 for requests from a page in a browser, also by a rebound DNS name; 415 for bodies that
    are not plain JSON.
    """
    name = re.sub(r":[0-9]+$", "", request.headers.get("Host", ""))
    fetched = request.headers.get("Sec-Fetch-Site", "none") != "none"
    if (
        "Origin" in request.headers
        or fetched
        or not (name in OWN_NAMES or name.strip("[]").replace(".", "").isdigit())
    ):
        return web.json_response(
            {"error": "requests from web pages and to foreign host names are refused"}, status=403
        )
    if request.body_exists and (
        request.content_type != "application/json" or "Content-Encoding" in request.headers
    ):
        return web.json_response(
            {"error": "send plain JSON with Content-Type: application/json"}, status=415
        )
    return await handler(request)


async def answer_expect(request: web.Request) -> None:
    """aiohttp's own answer to ``Expect`` repeats the header, and fails with 500 if that is not
    UTF-8.
    """
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="of Expect, this server knows 100-continue only\n")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def no_route(request: web.Request) -> web.Response:
    raise web.HTTPNotFound


def make_app(generators: dict[str, ModuleType], url: str, key: str) -> web.Application:
    """The HTTP server; ``url`` is where generators reach it, with ``key``."""
    buffers = {name: TaskBuffer(module) for name, module in generators.items()}

    def buffer_of(body: Row) -> TaskBuffer:
        if not isinstance(body, dict):
            raise ValueError("the body must be an object")
        if body.get("task_type") not in [*buffers]:
            raise ValueError(
                f"no generator for task_type {body.get('task_type')!r}; there are "
                f"{', '.join(buffers)}"
            )
        return buffers[body["task_type"]]

    async def start_rollout(body: Row) -> Row:
        buffer_of(body).start(
            {**body, "buffer_url": url, "buffer_headers": {"Authorization": f"Bearer {key}"}}
        )
        return {"started": len(body["groups"])}

    async def write(body: Row) -> Row:
        buffer_of(body).write(need(body, "group_index", int), need(body, "samples", list))
        return {"ok": True}

    async def get_rollout_data(body: Row) -> Row:
        return buffer_of(body).take(need(body, "num_groups", int))

    def post(path: str, call: Any) -> web.RouteDef:
        async def handler(request: web.Request) -> web.Response:
            try:
                return web.json_response(await call(await request.json()))
            # A generator's own checks of a group raise what they like.
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                return web.json_response(
                    {"error": f"{path}: {type(error).__name__}: {error}"}, status=400
                )

        return web.post(path, handler, expect_handler=answer_expect)

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"task_types": list(buffers)})

    app = web.Application(
        middlewares=[refuse_web_pages, require_key(key)], client_max_size=MAX_BODY_BYTES
    )
    app.add_routes([post("/start_rollout", start_rollout), post("/buffer/write", write)])
    app.add_routes([post("/get_rollout_data", get_rollout_data)])
    app.add_routes([web.get("/health", health, expect_handler=answer_expect)])
    app.add_routes([web.route("*", "/{path:.*}", no_route, expect_handler=answer_expect)])
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8889)
    parser.add_argument(
        "--key-file", type=Path, default=KEY_FILE, help="file with the key of requests"
    )
    options = parser.parse_args()
    OWN_NAMES.add(options.host)
    generators = find_generators(Path(__file__).parent / "generators")
    app = make_app(generators, f"http://{options.host}:{options.port}", key_in(options.key_file))
    web.run_app(app, host=options.host, port=options.port, print=None, auto_decompress=False)


if __name__ == "__main__":
    main()
